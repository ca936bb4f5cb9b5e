"""A thousand damaged files: what is no table is refused with its place, what is one is read as it stands.

``plain`` is a second reader, written from docs/formats.md alone: bytes to plain values, or None for no table.
"""

import random
import re

import pytest

from mpipipe.errors import TableFileError
from mpipipe.schedule import ScheduleTable, build, lower
from mpipipe.schedule.exchange import load_with_places, table_text
from mpipipe.schedule.exchange.csv_file import read_csv

ACTION = re.compile(r"(\d{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,9})", re.ASCII)
WORK = re.compile(r"(\d{1,9})([FB])(\d{1,9})", re.ASCII)
NEEDED = {"format", "version", "p", "v", "m", "placement"}
KNOWN = NEEDED | {"name", "mirror", "lowered"}


def plain_cell(text):
    """A list of (stage, kind, microbatch), empty for what is no action of ours; None for what is none at all."""
    if re.fullmatch(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)", text, re.ASCII) or not text:
        return []
    pair = re.fullmatch(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", text)
    parts = [part.strip(" ") for part in pair.groups()] if pair else [text]
    found = [(WORK if pair else ACTION).fullmatch(part) for part in parts]
    if None in found or (pair and found[0][2] == found[1][2]):
        return None
    return [(int(match[1]), match[2], int(match[3])) for match in found]


def plain_header(lines):
    header = {}
    for line in lines:
        key, equals, value = line[1:].partition("=")
        key = key.strip(" \t")
        if not equals or key in header or key not in KNOWN:
            return None
        header[key] = value.strip(" \t").rstrip(", \t")
    if not header.keys() >= NEEDED or header["format"] != "mpipipe-schedule":
        return None
    if not all(re.fullmatch(r"\d{1,9}", header[key], re.ASCII) for key in ("version", "p", "v", "m")):
        return None
    ranks = f"{header['placement']} {header.get('mirror', '')}".split()
    if not all(re.fullmatch(r"\d{1,9}", rank, re.ASCII) for rank in ranks):
        return None
    if int(header["version"]) != 1 or header.get("lowered", "true") not in ("true", "false"):
        return None
    return header


def plain(data):
    """(p, v, m, placement, mirror, lowered, rows) of a file's bytes; None for no table."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    data = data.replace(b"\r\n", b"\n")
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        return None
    if b"\0" in data or b"\r" in data or b'"' in data:
        return None
    while lines and not lines[-1].strip(" \t"):
        lines.pop()
    count = 0
    while count < len(lines) and lines[count].startswith("#"):
        count += 1
    header = plain_header(lines[:count]) if count else {}
    rows = [[plain_cell(cell.strip(" \t")) for cell in line.split(",")] for line in lines[count:]]
    if header is None or not rows or any(None in row for row in rows):
        return None
    if not all(line.strip(" \t") for line in lines[count:]):
        return None
    done = [[action for cell in row for action in cell] for row in rows]
    flat = [action for row in done for action in row]
    lowered = any("_" in kind for _, kind, _ in flat)
    if any(stage > 32767 for stage, _, _ in flat):
        return None
    if header:
        p, v, m = (int(header[key]) for key in ("p", "v", "m"))
        placement, mirror = ([int(r) for r in header.get(key, "").split()] for key in ("placement", "mirror"))
        if min(p, v, m) < 1 or p != len(rows) or not all(r < p for r in placement + mirror):
            return None
        if p * v > 32767 or len(placement) != p * v or ("mirror" in header and len(mirror) != p * v):
            return None
        if header.get("lowered") == "false" and lowered:
            return None
        lowered = header.get("lowered", str(lowered).lower()) == "true"
    else:
        owner = {}
        for rank, row in enumerate(done):
            for stage, _, _ in row:
                owner.setdefault(stage, rank)
        p, mirror = len(rows), []
        if not flat or sorted(owner) != list(range(len(owner))) or len(owner) % p:
            return None
        v, m = len(owner) // p, 1 + max(microbatch for _, _, microbatch in flat)
        placement = [owner[stage] for stage in range(len(owner))]
    if p * v * m > 1_000_000 + 16 * len(flat):
        return None
    return p, v, m, placement, mirror or None, lowered, done


def plain_table(table):
    rows = [[(each.stage, each.kind.name, each.microbatch) for each in table.actions(rank)] for rank in range(table.p)]
    mirror = None if table.mirror is None else list(table.mirror)
    return table.p, table.v, table.m, list(table.placement), mirror, table.lowered, rows


TWO_COPIES = ScheduleTable.from_rows(
    [["0F0", "(1F1;0B0)OVERLAP_F_B", "1B1"], ["1F0", "1B0", "0F1", "0B1"]], v=1, m=2, placement=[0, 1], mirror=[1, 0]
)
FILES = [
    table_text(build("1f1b", p=3, m=4), "csv"),
    table_text(lower(build("interleaved", p=2, v=2, m=2)), "csv"),
    table_text(TWO_COPIES, "csv"),
    table_text(build("interleaved", p=2, v=2, m=4), "torch-csv"),
    "1UNSHARD,,0F0,(0F1;0B0)OVERLAP_F_B,0B1,,0REDUCE_GRAD\r\n,1F0,1I0,1F1,1W0,1B1,1RESHARD\r\n",
]
BITS = [*"0123456789FBIWSENDRCV_,;()#= .\n\r\t\"'\0-+", "\n\n", ",,", "# ", "SEND_F", "999999999", "4294967296", "0F0"]
BYTES = [bit.encode() for bit in BITS] + [b"\xff", b"\xe9", b"\xef\xbb\xbf", b"\xc2\xa0", b"\xd9\xa1", b"\xc2\x85"]


def mutate(data, draw):
    """A few changes: bytes, cells, lines, or the end."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice((0, 1, 1, 2, 5)))
        lines = data.split(b"\n")
        row = draw.randrange(len(lines))
        cells = lines[row].split(b",")
        match draw.randrange(8):
            case 0 | 1 | 2:
                data = data[:at] + draw.choice(BYTES) + data[to:]
            case 3:
                data = data[:at] + data[to:]
            case 4:
                cells[draw.randrange(len(cells))] = draw.choice(cells)
                data = b"\n".join([*lines[:row], b",".join(cells), *lines[row + 1 :]])
            case 5:
                cells.insert(draw.randrange(len(cells) + 1), draw.choice((b"", b"0F1", b"1UNSHARD", b"7W", b"#")))
                data = b"\n".join([*lines[:row], b",".join(cells), *lines[row + 1 :]])
            case 6:
                data = b"\n".join([*lines[:row], *[lines[row]] * draw.choice((0, 2)), *lines[row + 1 :]])
            case 7:
                data = data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data
    return data


def test_the_files_are_tables(tmp_path):
    for text in FILES:
        path = tmp_path / "table.csv"
        path.write_bytes(text.encode())
        assert plain_table(load_with_places(path).table) == plain(text.encode())


def test_a_thousand_damaged_files(tmp_path):
    path = tmp_path / "table.csv"
    draw = random.Random(4)
    refused = read = 0
    for number in range(1200):
        data = mutate(FILES[number % len(FILES)].encode(), draw)
        expected = plain(data)
        if b'"' in data:
            continue
        found = error = None
        try:
            if number % 10 == 0:
                path.write_bytes(data)
                found = plain_table(load_with_places(path).table)
            else:
                found = plain_table(read_csv(data, str(path)).table)
        except TableFileError as caught:
            error = caught
        assert found == expected, (data, str(error))
        if error is None:
            read += 1
        else:
            check_place(error, data)
            refused += 1
    assert refused + read > 1000
    assert refused > 500
    assert read > 150


def check_place(error, data):
    """The line is there and, for a row, the cell; what is wrong with a whole row or file has no cell."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    assert error.line is not None, str(error)
    assert 1 <= error.line <= len(lines), (data, str(error))
    line = lines[error.line - 1].removeprefix(b"\xef\xbb\xbf")
    if error.cell is None:
        whole = ("rows found", "an empty line", "the file is empty", "UTF-16")
        assert line.startswith(b"#") or any(text in error.problem for text in whole), (data, str(error))
    else:
        assert 1 <= error.cell <= 1 + line.count(b","), (data, str(error))
    assert str(error).startswith(f"{error.file}:{error.line}")


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("cell", [0, 3, 7])
def test_the_place_is_that_of_the_damage(tmp_path, row, cell):
    rows = [line.split(",") for line in table_text(build("1f1b", p=3, m=4), "torch-csv").splitlines()]
    rows[row][cell] = "2Q7"
    path = tmp_path / "table.csv"
    path.write_text("\n".join(",".join(cells) for cells in rows))
    with pytest.raises(TableFileError, match="'2Q7' is no action") as caught:
        load_with_places(path)
    assert (caught.value.line, caught.value.cell, caught.value.action) == (row + 1, cell + 1, "2Q7")
