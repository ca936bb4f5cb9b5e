"""Batches from token files: windows, wrap-around, pairs that belong together, and files that can't be used."""

from __future__ import annotations

import logging
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpipipe.data import TokenSource, expand_paths
from mpipipe.errors import DataError
from mpipipe.formats.tokens import write_tokens

T = 8


def token_file(path: Path, tokens: np.ndarray | list[int], vocab: int = 70_000) -> str:
    write_tokens(path, [np.asarray(tokens, dtype=np.int64)], vocab, "test")
    return str(path)


def source(*entries: str, vocab: int = 70_000, shuffle: bool = True, sequence: int = T) -> TokenSource:
    return TokenSource(entries, sequence=sequence, vocab=vocab, seed=5, shuffle=shuffle)


def test_windows_in_order_with_the_last_token_as_a_label(tmp_path: Path) -> None:
    data = source(token_file(tmp_path / "a.h5", list(range(2 * T + 1))), shuffle=False)
    batch = data.batch(0, 3)
    assert data.num_windows == 2
    assert batch.inputs.tolist() == [
        list(range(8)),
        list(range(8, 16)),
        list(range(8)),
    ]  # the third is the next epoch's
    assert batch.targets.tolist() == [list(range(1, 9)), list(range(9, 17)), list(range(1, 9))]
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.inputs.flags.c_contiguous
    assert batch.targets.flags.c_contiguous


@pytest.mark.parametrize(
    ("num_tokens", "num_windows"), [(T + 1, 1), (T + 2, 1), (2 * T, 1), (2 * T + 1, 2), (3 * T + 5, 3)]
)
def test_number_of_windows(tmp_path: Path, num_tokens: int, num_windows: int) -> None:
    data = source(token_file(tmp_path / "a.h5", [1] * num_tokens))
    assert data.num_windows == num_windows


@pytest.mark.parametrize("num_tokens", [1, T])
def test_less_than_one_window_is_refused_also_among_good_files(tmp_path: Path, num_tokens: int) -> None:
    good, bad = token_file(tmp_path / "a.h5", [1] * 100), token_file(tmp_path / "b.h5", [1] * num_tokens)
    for entries in ([bad], [good, bad]):
        with pytest.raises(
            DataError, match=rf"data\.train: .*b\.h5 has {num_tokens} tokens, less than one window .* = 9"
        ):
            source(*entries)


def test_no_tokens_no_bytes_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.h5"
    with h5py.File(token_file(tmp_path / "none.h5", [1, 2]), "r+") as file:
        del file["tokens"]
        file.create_dataset("tokens", shape=(0,), dtype="<u2")
    with pytest.raises(DataError, match=r"none\.h5 has 0 tokens"):
        source(str(tmp_path / "none.h5"))
    empty.touch()
    with pytest.raises(DataError, match=r"empty\.h5: the file is empty \(0 bytes\)"):
        source(str(empty))
    with pytest.raises(DataError, match=r"data\.train: .*missing\.h5 does not exist"):
        source(str(tmp_path / "missing.h5"))
    with pytest.raises(DataError, match=r"data\.train: .* is no file"):
        source(str(tmp_path))
    with pytest.raises(DataError, match=r"data\.train: no file matches '.*none-\*\.h5'"):
        source(str(tmp_path / "none-*.h5"))
    with pytest.raises(DataError, match=r"data\.validation: no file is named"):
        TokenSource([], sequence=T, vocab=10, key="data.validation")


def test_several_files_and_globs(tmp_path: Path) -> None:
    a = token_file(tmp_path / "a.h5", list(range(2 * T + 1)))
    token_file(tmp_path / "b-2.h5", list(range(1000, 1000 + T + 3)))
    token_file(tmp_path / "b-1.h5", list(range(2000, 2000 + 3 * T + 1)))
    assert [path.name for path in expand_paths([a, str(tmp_path / "*.h5")], "k")] == ["a.h5", "b-1.h5", "b-2.h5"]
    data = source(a, str(tmp_path / "b-*.h5"), shuffle=False)
    assert data.num_windows == 2 + 3 + 1
    assert data.batch(0, 6).inputs[:, 0].tolist() == [0, 8, 2000, 2008, 2016, 1000]
    assert data.batch(5, 1).targets.tolist() == [list(range(1001, 1009))]
    shuffled = source(a, str(tmp_path / "b-*.h5")).batch(6, 6)
    assert sorted(shuffled.inputs[:, 0].tolist()) == [0, 8, 1000, 2000, 2008, 2016]


def test_input_and_label_belong_together_for_any_cut_of_the_run(tmp_path: Path) -> None:
    path = token_file(tmp_path / "a.h5", [i % 65_000 for i in range(21 * T + 4)])
    whole = source(path).batch(0, 100)
    assert np.array_equal(whole.targets, whole.inputs + 1)
    for start, count in ((0, 3), (17, 9), (63, 37)):  # as after a resume, in a new process: nothing is carried over
        part = source(path).batch(start, count)
        assert np.array_equal(part.inputs, whole.inputs[start : start + count])
        assert np.array_equal(part.targets, whole.targets[start : start + count])
    assert not np.array_equal(whole.inputs[:21], whole.inputs[21:42])


def test_ids_above_65535_keep_their_value(tmp_path: Path) -> None:
    tokens = list(range(65_500, 65_500 + 4 * T + 1))
    batch = source(token_file(tmp_path / "a.h5", tokens), shuffle=False).batch(0, 4)
    assert batch.inputs.reshape(-1).tolist() == tokens[:-1]


def test_file_for_a_larger_vocabulary_is_refused_at_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = token_file(tmp_path / "a.h5", [*[1] * 20, 300], vocab=400)
    with pytest.raises(DataError, match=r"a\.h5 holds token id 300 .*model\.vocab is 300; set model\.vocab to 400"):
        source(path, vocab=300)
    with caplog.at_level(logging.INFO):
        source(path, vocab=301)
    assert "made with a vocabulary of 400, model.vocab is 301" in caplog.text


@pytest.mark.parametrize("position", [0, 13, 2 * T])
def test_bad_id_that_the_file_does_not_tell_of_is_named(tmp_path: Path, position: int) -> None:
    first = token_file(tmp_path / "first.h5", [1] * (T + 1), vocab=101)
    path = token_file(tmp_path / "a.h5", [1] * (2 * T + 1), vocab=101)
    with h5py.File(path, "r+") as file:
        file["tokens"][position] = 101  # one id = vocab; max_id still says 1
    data = source(first, path, vocab=101)
    with pytest.raises(
        DataError, match=rf"data\.train: .*a\.h5, position {position}: token id 101 is outside 0 to 100 .*101"
    ):
        data.batch(0, data.num_windows)


def test_negative_id_is_named(tmp_path: Path) -> None:
    path = token_file(tmp_path / "a.h5", [1] * (T + 1), vocab=101)
    with h5py.File(path, "r+") as file:
        del file["tokens"]
        file["tokens"] = np.array([1] * T + [-1], dtype=np.int16)
    with pytest.raises(DataError, match=r"position 8: token id -1 is outside 0 to 100"):
        source(path, vocab=101).batch(0, 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_windows"), [(0, None), (1, None), (T, None), (T + 1, 1), (T + 2, 1), (2 * T, 1), (2 * T + 1, 2)]
)
def test_files_around_one_window(tmp_path: Path, num_tokens: int, num_windows: int | None) -> None:
    """Refused, or whole windows: never a source without any, whose run would end with no update done."""
    with h5py.File(token_file(tmp_path / "a.h5", [1] * max(num_tokens, 1), vocab=10), "r+") as file:
        del file["tokens"]
        file.create_dataset("tokens", data=np.arange(num_tokens, dtype="<u2") % 10)
    if num_windows is None:
        with pytest.raises(DataError, match=rf"a\.h5 has {num_tokens} tokens, less than one window of .* = {T + 1};"):
            source(str(tmp_path / "a.h5"), vocab=10)
        return
    data = source(str(tmp_path / "a.h5"), vocab=10, shuffle=False)
    assert data.num_windows == num_windows
    assert data.batch(num_windows - 1, 1).targets[0, -1] == num_windows * T % 10


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_a_batch_larger_than_the_data_set_and_one_step_more_than_an_epoch(
    tmp_path: Path, windows: int, shuffle: bool
) -> None:
    """B = 3 over data sets of B-2 to B+1 windows: it wraps around within the batch, each epoch whole."""
    data = source(token_file(tmp_path / "a.h5", list(range(windows * T + 1))), shuffle=shuffle)
    steps = windows // 3 + 1  # one more than an epoch holds
    firsts = [int(first) // T for step in range(steps + 3) for first in data.batch(step * 3, 3).inputs[:, 0]]
    for epoch in range(len(firsts) // windows):
        assert sorted(firsts[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_two_empty_files_among_good_ones_are_named(tmp_path: Path) -> None:
    good = [token_file(tmp_path / f"{name}.h5", [1] * 20) for name in "ad"]
    for name in "bc":
        (tmp_path / f"{name}.h5").touch()
    with pytest.raises(DataError, match=r"b\.h5: the file is empty \(0 bytes\)"):
        source(good[0], str(tmp_path / "b.h5"), str(tmp_path / "c.h5"), good[1])


def ids_of_32_bits_as_16(path: Path, ids: np.ndarray, vocab: int) -> str:
    """A token file in which 32-bit ids are declared as 16-bit ones, one half of an id lost."""
    halves = ids.astype("<u4").view("<u2")[:-1]
    with h5py.File(token_file(path, [1] * 3, vocab=vocab), "r+") as file:
        del file["tokens"]
        file.create_dataset("tokens", data=halves)
        file.attrs["max_id"] = int(halves.max())
    return str(path)


def test_ids_of_32_bits_that_are_declared_as_16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = ids_of_32_bits_as_16(tmp_path / "large.h5", np.arange(65_536, 65_936), 70_000)
    with pytest.raises(DataError, match=r"large\.h5: a vocabulary of 70000 ids .* stored as uint16, which holds 65536"):
        source(large)
    small = ids_of_32_bits_as_16(tmp_path / "small.h5", np.arange(1, 401), 500)
    assert source(small, vocab=500).files[0].length == 799
    assert "data.train: " in caplog.text
    assert "small.h5 holds 0 as every second token" in caplog.text
    caplog.clear()
    source(token_file(tmp_path / "zeros.h5", [0] * 400))
    source(token_file(tmp_path / "utf16.h5", list(("ordinary text, " * 20).encode("utf-16-le")), vocab=256))
    source(token_file(tmp_path / "good.h5", list(range(400))))
    assert "every second token" not in caplog.text


@pytest.mark.parametrize("bad", [101, -1])
def test_one_bad_id_at_the_very_last_position(tmp_path: Path, bad: int) -> None:
    tokens = np.arange(3 * T + 1) % 101
    tokens[-1] = bad
    with pytest.raises(DataError, match=rf"document 0, position {3 * T}: token id {bad} does not fit"):
        write_tokens(tmp_path / "a.h5", [tokens], 101, "test")
    with h5py.File(token_file(tmp_path / "b.h5", tokens[:-1].tolist(), vocab=101), "r+") as file:
        del file["tokens"]
        file["tokens"] = tokens
    data = source(str(tmp_path / "b.h5"), vocab=101, shuffle=False)
    data.batch(0, 2)
    with pytest.raises(DataError, match=rf"b\.h5, position {3 * T}: token id {bad} is outside 0 to 100"):
        data.batch(2, 1)
