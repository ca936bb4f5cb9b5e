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
    assert batch.samples == (0, 1, 2)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.inputs.flags.c_contiguous
    assert batch.targets.flags.c_contiguous
    assert [data.epoch_of(sample) for sample in (0, 1, 2)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("num_tokens", "num_windows"), [(T + 1, 1), (T + 2, 1), (2 * T, 1), (2 * T + 1, 2), (3 * T + 5, 3)]
)
def test_number_of_windows(tmp_path: Path, num_tokens: int, num_windows: int) -> None:
    data = source(token_file(tmp_path / "a.h5", [1] * num_tokens))
    assert (data.num_windows, data.num_tokens) == (num_windows, num_tokens)


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
        assert part.samples == whole.samples[start : start + count]
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
