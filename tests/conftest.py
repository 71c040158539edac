from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter
from typing import Any

import pytest

import instructions

instructions.leave_out_broken()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in processes that tests start: two workers share the cores

import torch  # noqa: E402

from nanguard.hosted import step as hosted_step  # noqa: E402

if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks are all here, and names of hosts may lead elsewhere

# Compiled kernels are kept between runs, but never shared between instruction sets: torch loads what it finds.
_KERNELS = f"nanguard-inductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _KERNELS))


LONG = frozenset(
    [
        "test_a_healthy_run_with_one_guarded_rank_is_the_plain_run",
        "test_policies_and_clipping_by_name",
        "test_quietly",
        "test_a_million_steps_stay_under_ten_megabytes",
        "test_cut_off_at_every_byte_it_reads_as_far_as_it_goes",
        "test_nanguard_run_notifies_of_an_unchanged_program_once",
        "test_a_run_that_is_killed_at_any_moment_leaves_all_but_the_last_second",
        "test_as_a_process_it_ends_with_the_same_status",
        "test_a_trace_finds_the_first_one",
        "test_two_runs_at_once_have_a_folder_each",
        "test_with_workers_too",
        "test_a_program_has_its_own_folder_runs_to_itself",
        "test_a_hundred_thousand_steps_are_there_at_once_and_in_full",
        "test_killed_200_times_the_newest_good_one_always_loads",
        "test_without_saved_weights_the_program_runs_up_to_the_step",
        "test_the_same_seed_gives_the_same_result_and_another_does_not",
        "test_json_is_one_object_also_where_something_is_wrong",
        "test_shards_of_two_ranks_are_one_tensor",
        "test_a_run_that_makes_no_progress_is_stopped_and_its_status_says_so",
        "test_on_a_narrow_screen_nothing_in_the_chart_lies_on_anything_else",
        "test_quiet_prints_the_comparison_only",
        "test_under_run_the_fix_that_was_tried_can_be_applied_there",
        "test_compiled_code_compiles_anew",
        "test_in_a_pipe_it_is_plain_text_of_80_columns",
        "test_so_it_does_on_the_device",
        "test_the_log_is_json_lines",
        "test_a_stateful_loader_goes_on_as_if_never_stored",
        "test_parts_of_a_model_that_are_called_one_by_one",
        "test_a_debugger_and_two_profilers_see_the_program_as_without_nanguard",
    ]
)
"""Each takes many seconds, mostly for new processes, and others try the same parts each time."""

THINNED = {
    "test_what_is_said_about_a_program_is_right": 3,
    "test_the_record_is_named": 3,
    "test_a_late_run_with_faults_is_the_eager_run": 4,
    "test_all_numbers_are_those_of_a_run_that_is_asked_at_once": 3,
    "test_a_fault_in_a_loss_is_found_the_first_time": 3,
    "test_of_a_nan_no_rule_is_a_cause": 5,
    "test_a_run_that_went_back_ends_as_the_one_that_did_not": 2,
    "test_facts_made_by_someone_else_run_nothing": 3,
    "test_the_examination_touches_nothing": 3,
    "test_a_resumed_run_is_the_uninterrupted_one": 3,
    "test_a_healthy_program_is_the_same_program": 2,
    "test_a_program_behaves_as_under_python": 3,
    "test_a_run_that_is_examined_ends_in_the_same_weights": 5,
    "test_the_step_is_run_again_with_the_memory_of_the_snapshots": 3,
    "test_one_that_raises_is_logged_once_and_dropped": 3,
    "test_damage_is_said": 3,
    "test_a_file_that_is_not_there_is_said_with_status_2": 3,
    "test_so_is_one_at_the_end_of_the_process": 2,
    "test_under_nanguard_run_an_unchanged_loop_leaves_the_step_out": 3,
    "test_child_processes_are_guarded_too_or_it_is_said_that_they_are_not": 2,
    "test_json_is_one_object": 3,
    "test_a_bug_in_the_loss_is_not_taken_for_bad_data_and_ends_the_run": 3,
    "test_a_bad_step_changes_nothing": 4,
    "test_a_bad_step_changes_nothing_when_the_host_learns_late": 3,
    "test_the_same_twenty_steps_follow_a_rollback": 2,
    "test_a_guarded_loop_that_leaves_a_bad_batch_out": 3,
    "test_a_program_that_leaves_a_bad_batch_out_has_never_seen_it": 3,
    "test_compiled_code_takes_changes_up": 3,
    "test_the_dataset_index_of_a_sample_is_told": 2,
    "test_bad_steps_never_happened": 4,
    "test_a_record_is_that_of_the_plain_program": 3,
    "test_a_batch_may_make_several_steps": 3,
    "test_a_program_that_makes_no_step_leaves_nothing_behind": 3,
    "test_a_program_that_updates_its_tensors_itself": 2,
    "test_ranks_that_a_program_starts_itself_are_guarded": 2,
    "test_the_programs_variables_are_what_they_were": 2,
    "test_under_nanguard_run": 2,
    "test_the_program_of_a_page_has_its_cause_and_the_panel_is_what_nanguard_says": 2,
    "test_three_an_epoch_are_skipped_and_the_fourth_halts": 2,
    "test_an_error_that_ends_the_program_is_explained": 2,
    "test_a_sound_program_is_silent": 2,
    "test_strides_and_chunks_make_no_difference": 2,
    "test_the_first_bad_step_has_one_incident_with_op_line_and_cause": 2,
    "test_help_fills_the_width_of_the_terminal": 3,
    "test_help_needs_no_torch": 4,
    "test_a_latent_bug_is_found_with_its_op_and_line": 2,
    "test_so_it_is_with_every_way_to_clip": 2,
    "test_each_program_is_diagnosed": 2,
    "test_a_faulty_program_ends_with_finite_weights_and_its_guilty_line_is_named": 2,
    "test_a_healthy_guarded_run_is_the_plain_run": 3,
}
"""Of the cases of these tests, one in so many is tried each time: all of them would take several minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the long campaigns whole, not a slice of each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--campaign"):
        rest = pytest.mark.skip(reason="the rest of a long campaign: make campaign, or pytest --campaign")
        seen: Counter[str] = Counter()
        for item in items:
            name = getattr(item, "originalname", "")
            is_rest = "campaign" in item.keywords or name in LONG
            if name in THINNED and not is_rest:
                is_rest = seen[name] % THINNED[name] != 0
                seen[name] += 1
            if is_rest:
                item.add_marker(rest)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _only_its_own_log(request: pytest.FixtureRequest) -> None:
    """A guard that an earlier test has left behind is summed up when it is collected: before the log is looked at."""
    if "caplog" in request.fixturenames:
        gc.collect()
        request.getfixturevalue("caplog").clear()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def traced_ops(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many ops of the program were traced as they ran, with gradients on (True) or off."""
    from nanguard.diagnosis import live

    seen: Counter[bool] = Counter()

    class Counted(live.Trace):
        def _remember_node(self, *args: Any) -> None:  # called for each op, after its line was looked for
            seen[torch.is_grad_enabled()] += 1
            super()._remember_node(*args)

    monkeypatch.setattr(live, "Trace", Counted)
    return seen


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host hears of a step later. Fused optimizers of a CPU skip steps by a flag as those of a GPU do."""
    choose = hosted_step.choose_sync
    monkeypatch.setattr(
        hosted_step, "choose_sync", lambda sync, parts: choose("late" if sync == "auto" else sync, parts)
    )


def pytest_collection_finish() -> None:
    """What was imported stays. To look through it at each collection of garbage took half the time of some files."""
    gc.collect()
    gc.freeze()
