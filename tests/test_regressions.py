"""One story per failure that users of other pipeline trainers reported, and the tests that hold it.

The numbers (B01 ...) are those that the tests' docstrings use. Stories that no other test holds are told in
tests/regressions/. A test below sees to it that this table can't rot.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SUMS = "regressions/test_sums_and_norms.py"
SHAPES = "regressions/test_layers_and_shapes.py"
MEMORY = "regressions/test_memory_stories.py"
DATA = "regressions/test_data_stories.py"
STATE = "regressions/test_state_stories.py"
SOURCE = "unit/data/test_token_source.py"
RUN_FILE = "unit/config/test_run_file.py"

STORIES: dict[str, tuple[str, ...]] = {
    "B01 gradients accumulated over several calls were divided at the end of each, a decaying average": (
        f"{SUMS}::test_gradients_over_several_calls_are_divided_once",
    ),
    "B01 loss right, gradients too large; under gpipe every backward began from the last microbatch's loss": (
        f"{SUMS}::test_the_split_into_microbatches_does_not_change_three_steps",
        "test_independent_loop.py::test_twenty_steps_follow_a_plain_torch_loop",
        "unit/engine/test_engine.py::test_losses_are_summed_in_microbatch_order",
        "unit/stage/test_stage_layers.py::test_a_loss_without_a_gradient_is_refused_and_not_trained_on",
        "unit/trainer/test_same_arguments.py::test_a_step_inside_no_grad_trains_all_the_same",
    ),
    "B02 mean of the microbatches' means: sparse labels weigh more, and the result hangs on m": (
        "unit/optim/test_gradient_norm.py::test_unevenly_spread_labels_weigh_alike",
        "test_loss_weighting.py::test_loss_and_norm_do_not_depend_on_where_the_valid_labels_lie",
        "test_loss_weighting.py::test_a_batch_without_a_valid_label_changes_nothing",
        "unit/stage/test_stage_layers.py::test_what_is_counted_is_a_whole_number",
    ),
    "B02 validation was a mean of batch means, a short last batch counted too much": (
        f"{DATA}::test_an_evaluation_weighs_tokens_and_not_batches",
        "unit/trainer/test_trainer_state.py::test_an_evaluation_is_weighted_by_items_and_not_by_batches",
    ),
    "B03 the head's copy of a tied embedding drifted away, or its sum was a collective that some ranks never entered": (
        f"{SUMS}::test_both_copies_of_a_tied_weight_stay_one_weight",
        "unit/trainer/test_tied_weights.py::test_copies_stay_equal_and_every_cut_gives_one_rank_s_bits",
        "unit/trainer/test_tied_weights.py::test_moments_and_norms_know_a_tied_weight_once",
        "unit/trainer/test_tied_weights.py::test_a_frozen_tied_weight_stays_and_is_restored_on_every_rank",
    ),
    "B04 each rank clipped by the norm of its own stage, or the tied weight counted twice": (
        f"{SUMS}::test_a_small_norm_clips_the_whole_model_by_one_factor",
        "unit/optim/test_gradient_norm.py::test_one_norm_clips_all_ranks_and_a_tied_weight_counts_once",
    ),
    "B06 initial weights hung on the number of stages, or stages began with equal ones": (
        f"{SHAPES}::test_stages_do_not_start_from_weights_that_hang_on_the_cut",
        "unit/model/test_initial_weights.py::test_any_order_of_building_gives_the_same_bits",
        "unit/model/test_initial_weights.py::test_no_two_matrices_are_equal_and_deviations_are_gpt2s",
        "unit/stage/test_random_layers.py::test_factories_draw_by_seed_and_layer_and_leave_the_generator_alone",
    ),
    "B06 dropout came from one stream a process: other partitions, other results": (
        f"{SHAPES}::test_one_config_twice_is_one_run",
        "test_transparency.py::test_same_bits_for_every_cut_and_schedule",
        "test_transparency.py::test_clipping_and_dropout_act_in_these_runs",
        "unit/model/test_keyed_dropout.py::test_mask_of_a_sample_does_not_depend_on_the_split",
    ),
    "B09 fewer microbatches than ranks, or a number that does not divide, was a hang or an obscure refusal": (
        "test_grid.py::test_every_combination_ends_and_equals_one_rank",
        "test_grid.py::test_more_stages_than_layers_are_refused_on_every_rank",
        "unit/trainer/test_every_layer_once.py::test_every_number_of_microbatches_runs_on_any_ranks",
        "unit/trainer/test_trainer_state.py::test_evaluating_in_between_changes_no_bit",
    ),
    "B11 layers vanished where they did not divide evenly": (
        "unit/trainer/test_every_layer_once.py::test_layers_that_do_not_divide",
        "unit/trainer/test_every_layer_once.py::test_all_ranks_know_the_same_list_of_parameters",
        "unit/trainer/test_every_layer_once.py::test_more_stages_than_layers_are_refused_alike",
        "unit/trainer/test_every_layer_once.py::test_a_listed_partition_that_does_not_add_up_is_refused",
        "unit/partition/test_split_layers.py::test_every_layer_lies_on_exactly_one_stage",
        "unit/partition/test_split_layers.py::test_listed_split_that_does_not_add_up_is_refused",
    ),
    "B12 receive buffers were sized by the first microbatch": (
        f"{SHAPES}::test_sequences_of_16_and_9_in_one_step",
        f"{SHAPES}::test_short_sequences_weigh_by_their_tokens",
        f"{SHAPES}::test_a_batch_of_8_in_microbatches_of_3",
        "unit/engine/test_engine.py::test_sequence_and_batch_may_change_from_step_to_step",
        "unit/engine/test_mail.py::test_an_output_shape_that_hangs_on_the_contents_is_told_in_the_first_step_already",
        "unit/trainer/test_same_arguments.py::test_a_batch_of_another_size_on_one_rank_is_refused",
    ),
    "B14 inputs and labels came from two loaders and no longer belonged together": (
        f"{DATA}::test_first_and_last_rank_look_at_the_same_samples",
        "unit/trainer/test_labels_follow_inputs.py::test_the_loss_falls_to_zero_where_the_next_token_is_certain",
        f"{SOURCE}::test_input_and_label_belong_together_for_any_cut_of_the_run",
        "unit/data/test_sampling.py::test_every_epoch_visits_every_window_once_in_its_own_order",
        "unit/stage/test_random_layers.py::test_the_user_s_own_draws_are_alike_on_every_rank",
    ),
    "B17 the loss is known on the last rank only, and the first printed -1": (
        f"{MEMORY}::test_the_loss_that_is_told_is_the_true_one_once_a_step",
        "unit/trainer/test_train_run.py::test_ranks_write_the_same_metrics_and_checkpoints",
    ),
    "B17 activations of all microbatches stayed referenced": (
        f"{MEMORY}::test_activations_are_not_kept_for_every_microbatch",
        "unit/engine/test_engine.py::test_activations_kept_are_those_of_the_simulation",
        "unit/trainer/test_trainer_state.py::test_what_is_kept_of_one_microbatch_is_let_go",
    ),
    "B17 memory grew from step to step": (
        f"{MEMORY}::test_memory_stays_flat_over_300_steps",
        f"{MEMORY}::test_nothing_holds_a_batch_after_its_step",
        "unit/stage/test_split_backward.py::test_two_halves_have_the_bits_of_one_backward",
        "unit/trainer/test_trainer_state.py::test_memory_is_flat_over_fifty_steps",
        "unit/engine/test_mail.py::test_sequences_of_ever_new_lengths_do_not_pile_up_buffers",
    ),
    "B22 an exception on one rank left the others waiting for ever": (
        "mpi/test_fault_matrix.py::test_a_fault_on_one_rank_ends_the_job",
        "mpi/test_fault_matrix.py::test_a_fault_after_the_status_is_written_ends_the_job",
        "mpi/test_fault_matrix.py::test_ranks_on_which_mpi_does_not_start_end_the_launch",
        "mpi/test_faults.py::test_an_exception_on_one_rank_ends_the_job",
        "mpi/test_faults.py::test_a_rank_that_is_killed_ends_the_job",
        "mpi/test_faults.py::test_a_batch_of_another_size_on_one_rank_ends_the_job",
        "mpi/test_faults.py::test_bad_data_that_only_some_ranks_read_ends_the_job",
        "unit/cli/test_on_ranks.py::test_a_failure_of_one_rank_is_told_with_its_traceback_and_aborts",
        "unit/trainer/test_trainer_end.py::test_an_error_while_the_trainer_closes_ends_the_job",
    ),
    "B25 a misspelt key was dropped in silence; a wrong number of ranks was told in figures nobody had written": (
        f"{STATE}::test_a_mistake_in_the_run_file_is_told_once_and_ends_all_ranks",
        f"{RUN_FILE}::test_unknown_key_names_the_nearest",
        f"{RUN_FILE}::test_key_in_the_wrong_section_says_where_it_belongs",
        f"{RUN_FILE}::test_wrong_value",
        f"{RUN_FILE}::test_resolve_refuses_another_number_of_ranks",
        "mpi/test_faults.py::test_a_wrong_run_file_is_told_once",
    ),
    "B30 only half of the parameters were saved, under local numbers, and no other number of ranks could load them": (
        f"{STATE}::test_a_checkpoint_holds_every_layer_once_under_its_own_number",
        f"{STATE}::test_no_chunk_overwrites_another_s_parameters",
        f"{STATE}::test_saved_by_four_ranks_and_gone_on_in_any_layout",
        "test_transparency.py::test_resuming_at_another_depth_changes_no_bit",
        "unit/checkpoint/test_checkpoint_save.py::test_the_tensors_and_checksums_do_not_depend_on_who_saved",
    ),
    "B36 token ids beyond the vocabulary crashed far from their cause; ids above 65,535 wrapped around": (
        f"{DATA}::test_ids_of_a_vocabulary_of_70000_reach_their_rows",
        f"{DATA}::test_a_wrong_id_ends_the_run_and_not_the_kernel",
        "unit/formats_tokens/test_token_file.py::test_no_wrapping_above_65535",
        "unit/formats_tokens/test_token_file.py::test_writer_refuses_what_does_not_fit_and_leaves_nothing",
        f"{SOURCE}::test_one_bad_id_at_the_very_last_position",
        f"{SOURCE}::test_negative_id_is_named",
        f"{SOURCE}::test_ids_of_32_bits_that_are_declared_as_16",
        f"{SOURCE}::test_file_for_a_larger_vocabulary_is_refused_at_open",
    ),
    "B37 a data set smaller than a batch or a window ended as a success without one update": (
        f"{DATA}::test_a_data_set_smaller_than_a_batch_still_trains",
        f"{DATA}::test_a_file_without_a_window_is_no_success",
        f"{SOURCE}::test_files_around_one_window",
        f"{SOURCE}::test_a_batch_larger_than_the_data_set_and_one_step_more_than_an_epoch",
        f"{SOURCE}::test_two_empty_files_among_good_ones_are_named",
        f"{SOURCE}::test_windows_in_order_with_the_last_token_as_a_label",
        "unit/trainer/test_train_run.py::test_bad_data_is_told_in_the_status_with_the_exit_code_of_the_job",
    ),
}


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert len(found) == len(set(found)), f"{path}: two tests of one name, the first never runs"
    return frozenset(found)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.split(":")[0][:60])
def test_the_tests_of_a_story_exist(story: str) -> None:
    assert STORIES[story]
    for place in STORIES[story]:
        path, _, name = place.partition("::")
        assert (TESTS / path).is_file(), place
        assert name in names_in(TESTS / path), place


def test_every_test_that_tells_a_story_is_in_the_table() -> None:
    named = {place for places in STORIES.values() for place in places}
    files = sorted((TESTS / "regressions").glob("test_*.py"))
    assert len(files) == 5
    for path in files:
        for name in names_in(path):
            assert f"regressions/{path.name}::{name}" in named
