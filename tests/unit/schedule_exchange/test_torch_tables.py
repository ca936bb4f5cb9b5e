"""Tables of torch.distributed.pipelining: its own load here unchanged, ours load there. Without torch: skipped.

torch's classes are built without ranks or models: on stages that only say how many there are.
"""

import csv
from collections import defaultdict

import pytest
from torch_stub import stage

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Kind, ScheduleTable, build, find_problems, lower, names, strip
from mpipipe.schedule.exchange import load_table, save_table
from mpipipe.schedule.exchange.torch_csv import in_sending_order

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
OF_SEVERAL_STAGES = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", *V_SHAPED)
FORMS = {"compute_only": "torch-csv", "compute_comms": "torch-comms-csv"}


def torch_schedules():
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    return schedules


def torch_schedule(name, p, v, m):
    """torch's schedule, or its runtime without a table for ``_PipelineScheduleRuntime``."""
    kind = getattr(torch_schedules(), name)
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        return kind(stage(0, p, p), m, loss_fn=print)
    if name in V_SHAPED:
        return kind([stage(0, p, 2 * p), stage(2 * p - 1, p, 2 * p)], m, loss_fn=print)
    return kind([stage(chunk * p, p, v * p) for chunk in range(v)], m, loss_fn=print)


def cells(path):
    with open(path, newline="") as file:
        return [[cell for cell in row if cell] for row in csv.reader(file)]


def check_round_trip(path, table, tmp_path):
    """torch's file, read and written in its own form; the same by way of our CSV and HDF5."""
    form = FORMS["compute_comms" if table.lowered else "compute_only"]
    back = tmp_path / "back.csv"
    save_table(table, back, form)
    assert cells(back) == cells(path)
    for ours in ("ours.csv", "ours.h5"):
        save_table(table, tmp_path / ours)
        assert load_table(tmp_path / ours) == table
        save_table(load_table(tmp_path / ours), back, form)
        assert cells(back) == cells(path)


@pytest.mark.parametrize("torch_form", FORMS)
@pytest.mark.parametrize("name", OF_SEVERAL_STAGES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_torchs_tables_load_unchanged(tmp_path, name, p, m, torch_form):
    path = tmp_path / "torch.csv"
    torch_schedule(name, p, 2, m)._dump_csv(path, torch_form)
    table = load_table(path)
    assert (table.p, table.v, table.m, table.lowered) == (p, 2, m, torch_form == "compute_comms")
    assert find_problems(table) == []
    assert bool(table.overlaps.size) == (name == "ScheduleDualPipeV")
    assert bool(table.extras) == table.lowered
    check_round_trip(path, table, tmp_path)


@pytest.mark.parametrize("name", OF_SEVERAL_STAGES)
def test_torchs_two_forms_are_one_table(tmp_path, name):
    schedule = torch_schedule(name, 4, 2, 8)
    for torch_form in FORMS:
        schedule._dump_csv(tmp_path / f"{torch_form}.csv", torch_form)
    messages = load_table(tmp_path / "compute_comms.csv")
    assert strip(messages) == load_table(tmp_path / "compute_only.csv")
    save_table(messages, tmp_path / "stripped.csv", "torch-csv")
    assert cells(tmp_path / "stripped.csv") == cells(tmp_path / "compute_only.csv")


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_torchs_drawn_tables_of_one_stage_load(tmp_path, name):
    """torch numbers the forwards of 1F1B's last rank from 1 in what it draws (not in what it runs): read as it is."""
    order = torch_schedule(name, 4, 1, 8)._get_pipeline_order()
    path = tmp_path / "torch.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in range(4))
    table = load_table(path)
    assert [extra.text for extra in table.extras] == [f"{rank}REDUCE_GRAD" for rank in range(4)]
    check_round_trip(path, table, tmp_path)
    ours = build("gpipe" if name == "ScheduleGPipe" else "1f1b", p=4, m=8)
    right = 4 if name == "ScheduleGPipe" else 3
    assert table.rows()[:right] == ours.rows()[:right]
    assert table.m == (8 if name == "ScheduleGPipe" else 9)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("torch_form", FORMS)
def test_our_tables_load_in_torch(tmp_path, name, torch_form):
    """All but those with two copies of a stage."""
    path = tmp_path / "ours.csv"
    for p, m in ((2, 4), (4, 8)):
        table = build(name, p=p, m=m, v=2 if name in ("interleaved", "looped-bfs", "interleaved-zb") else None)
        if table.mirror is not None:
            with pytest.raises(ScheduleError, match="two ranks"):
                save_table(table, path, FORMS[torch_form])
            continue
        save_table(table, path, FORMS[torch_form])
        runtime = torch_schedule("_PipelineScheduleRuntime", table.p, table.v, table.m)
        runtime._load_csv(str(path), torch_form)
        assert runtime.stage_index_to_group_rank == dict(enumerate(table.placement))
        found = runtime.pipeline_order if torch_form == "compute_only" else runtime.pipeline_order_with_comms
        assert [[str(action) for action in found[rank]] for rank in range(table.p)] == cells(path)
        if torch_form == "compute_comms" and not table.overlaps.size:  # torch's simulator knows no overlapped pairs
            runtime._simulate()


def messages(table):
    """The messages from each rank to each other in the order of sending, and the same in the order of receiving."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(table.p):
        for action in table.actions(rank):
            step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            peer = table.placement[action.stage + step] if action.kind > Kind.W else rank
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                sent[rank, peer].append((action.stage + step, action.kind.name[-1], action.microbatch))
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                received[peer, rank].append((action.stage, action.kind.name[-1], action.microbatch))
    return sent, received


def test_messages_for_torch_are_received_in_the_order_of_sending(tmp_path):
    """torch's messages have no names. In a V two chunks of one rank send to one other, and the order of use differs."""
    changed = []
    for name in names():
        table = build(name, p=4, m=8, v=2 if name in ("interleaved", "looped-bfs", "interleaved-zb") else None)
        if table.mirror is not None:
            continue
        save_table(table, tmp_path / "table.csv", "torch-comms-csv")
        found = load_table(tmp_path / "table.csv")
        sent, received = messages(found)
        assert sent == received, name
        assert strip(found) == table
        assert find_problems(found) == []
        sent, received = messages(lower(table))
        assert (sent == received) == (found == lower(table)), name
        if found != lower(table):
            changed.append(name)
    assert {"zb-v", "dualpipe-v"} <= set(changed)
    assert "1f1b" not in changed


def test_a_receive_that_is_moved_leaves_pairs_and_extras_in_place():
    rows = [
        ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
        ["1F1", "1F0", "9UNSHARD", "(2F0;2B1)OVERLAP_F_B", "1B0", "2F1", "2B0", "1B1", "9RESHARD"],
    ]
    table = ScheduleTable.from_rows(rows, placement=[0, 1, 1, 0])
    found = in_sending_order(lower(table))
    assert found.rows()[1][:3] == ["1RECV_F0", "1RECV_F1", "1F1"]
    assert strip(found) == table
    assert strip(found).extras == table.extras


def test_a_table_without_its_last_backward_is_refused_by_torch(tmp_path):
    rows = build("1f1b", p=2, m=2).rows()
    (tmp_path / "ours.csv").write_text("\n".join(",".join(row) for row in (rows[0][:-1], rows[1])))
    runtime = torch_schedule("_PipelineScheduleRuntime", 2, 1, 2)
    with pytest.raises(AssertionError, match="expected 2 total backwards"):
        runtime._load_csv(str(tmp_path / "ours.csv"), "compute_only")


def test_extras_stay_before_their_action_through_lowering():
    rows = [["0UNSHARD", "0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD"], ["1F0", "1B0", "1RESHARD", "1F1", "1B1"]]
    table = ScheduleTable.from_rows(rows)
    lowered = lower(table)
    assert [(extra.rank, extra.row, extra.text) for extra in lowered.extras] == [
        (0, 0, "0UNSHARD"),
        (0, 8, "0REDUCE_GRAD"),
        (1, 4, "1RESHARD"),
    ]
    assert lowered.rows()[1][:5] == ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1"]
    assert strip(lowered).extras == table.extras


def test_the_text_for_torch(tmp_path):
    rows = [["0UNSHARD", "0F0", "0B0"], ["1F0", "1B0", "1REDUCE_GRAD"]]
    table, path = ScheduleTable.from_rows(rows), tmp_path / "torch.csv"
    save_table(table, path, "torch-csv")
    assert path.read_text() == "0UNSHARD,0F0,0B0\n1F0,1B0,1REDUCE_GRAD\n"
    save_table(table, path, "torch-comms-csv")
    assert path.read_text() == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    save_table(load_table(path), path, "torch-csv")
    assert path.read_text() == "0F0,0B0\n1F0,1B0\n"


def test_what_torchs_files_can_not_say(tmp_path):
    both = ScheduleTable.from_rows([["0F0", "1F1"], ["1F0", "0F1"]], placement=[0, 1], mirror=[1, 0])
    wrong = ScheduleTable.from_rows([["0F0", "5F0"], ["1F0"]], placement=[0, 1], v=1)
    for form in ("torch-csv", "torch-comms-csv"):
        with pytest.raises(ScheduleError, match="each stage on two ranks"):
            save_table(both, tmp_path / "a.csv", form)
    with pytest.raises(ScheduleError, match="5F0"):
        save_table(wrong, tmp_path / "a.csv", "torch-comms-csv")
    assert list(tmp_path.iterdir()) == []
