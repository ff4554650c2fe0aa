"""The scenarios behind the README's table, which `make test` runs with all that starts no process.

tests/test_project.py compares the titles with the README's, tests/conftest.py picks the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

ROWS: Mapping[str, tuple[str, ...]] = {
    "Stopping works": (
        "scenarios/test_magics.py::TestInterrupts::test_ranks_have_one_interrupt_and_time_to_save",
        "scenarios/test_launcher.py::TestStops::test_ranks_that_ignore_every_signal_they_can",
    ),
    "Crashes are explained": (
        "scenarios/test_launcher.py::TestFailures::test_a_signal",
        "scenarios/test_magics.py::TestThatGoesWrong::test_a_known_cause_is_explained",
        "scenarios/test_magics.py::TestThatGoesWrong::test_a_traceback_is_shown_once_and_folded",
    ),
    "Hangs end": ("scenarios/test_hang.py::test_who_waits_where_and_who_is_elsewhere",),
    "Runs resume": (
        "scenarios/test_magics.py::TestThatGoesWrong::"
        "test_retries_and_a_later_run_go_on_from_the_last_checkpoint",
    ),
    "Clean-up on kernel death": (
        "scenarios/test_launcher.py::TestLaunchers::test_the_kernel_s_end_ends_everything",
    ),
    "Environment check": ("kernel/test_setup.py::TestKernel::test_the_card",),
    "Mistakes are found early": (
        "scenarios/test_magics.py::TestThatGoesWrong::test_what_would_surely_fail_is_not_started",
        "test_cli.py::TestLint::test_text",
    ),
    "Single-core debugging": (
        "scenarios/test_magics.py::TestDebug::test_the_value_is_shown_and_the_device_is_said_once",
        "diagnostics/cell/test_run.py::test_it_is_html_in_a_notebook",
    ),
    "One card for each run": (
        "scenarios/test_magics.py::TestATrainCell::test_what_is_seen",
        "scenarios/test_magics.py::TestATrainCell::test_what_stays_at_the_end",
    ),
    "What the chips do": (
        "scenarios/test_chips.py::test_a_run_shows_its_chips_and_keeps_what_they_did",
    ),
    "Long runs": (
        "scenarios/test_background.py::TestInTheBackground::"
        "test_waiting_has_an_end_and_the_run_goes_on",
        "scenarios/test_background.py::TestDetached::"
        "test_a_run_in_the_foreground_is_followed_from_elsewhere",
    ),
    "Runs can be compared": ("scenarios/test_magics.py::TestListings::test_runs_and_logs",),
    "Start-up is paid once": (
        "scenarios/test_launcher.py::TestLaunchers::"
        "test_a_warm_fork_server_is_kept_and_a_different_environment_gets_a_new_one",
    ),
    "Cells run once": (
        "scenarios/test_kept_preludes.py::test_nothing_runs_again_while_nothing_has_changed",
        "scenarios/test_kept_preludes.py::test_a_prelude_that_has_run_ahead",
    ),
    "Safe forks": ("scenarios/test_launcher.py::TestReplicate::test_backward_pass",),
    "Data is downloaded once": ("data/test_urls.py::test_the_web_with_lost_connections",),
    "Exact sharding": (
        "scenarios/test_training_on_ranks.py::"
        "test_real_ranks_meet_in_every_step_and_see_each_sample_once",
        "scenarios/test_training_on_ranks.py::test_all_ranks_share_the_work_and_rank_0_has_all",
    ),
    "Exact big batches": (
        "scenarios/test_training_on_ranks.py::"
        "test_ranks_with_unequal_masks_learn_from_every_sample_alike",
    ),
    "Faithful rehearsal": (
        "scenarios/test_deadlocks.py::test_within_a_function_that_is_launched",
        "scenarios/test_launcher.py::TestFailures::"
        "test_a_collective_that_does_not_fit_names_cells_and_lines",
    ),
    "Libraries run unmodified": (
        "scenarios/test_launcher.py::TestThatWorks::test_dataloader_workers_work_in_ranks",
        "scenarios/test_libraries.py::test_accelerate_uses_the_ranks_of_the_run",
    ),
    "A pod is one more option": (
        "scenarios/test_places.py::test_a_train_cell_runs_on_every_host",
        "scenarios/test_places.py::test_a_host_that_differs_is_refused_before_anything_starts",
    ),
    "Cost control": ("scenarios/test_auto_stop.py::test_it_is_taken_back_or_refused",),
    "Shared machines": (
        "runs/test_ownership.py::test_what_another_user_put_into_returns_is_not_unpickled",
        "scenarios/test_launcher.py::test_what_the_kernel_and_the_supervisor_write_is_private",
    ),
    "A standalone script": (
        "scenarios/test_launch.py::test_the_exported_script_calls_the_function_on_every_rank",
    ),
}
"""By the title of a line: names of tests below `tests/`, without parameters."""

SCENARIOS = frozenset(name for names in ROWS.values() for name in names)
