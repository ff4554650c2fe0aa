"""The scenarios behind the README's table, which `make test` runs with all that starts no process.

tests/test_project.py compares the titles with the README's, tests/conftest.py picks the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

ROWS: Mapping[str, tuple[str, ...]] = {
    "Stopping works": (
        "scenarios/test_magics.py::TestInterrupts::test_interrupt_stops_ranks_once_with_time_to_save",
        "scenarios/test_launcher.py::TestStops::test_stop_kills_ranks_that_ignore_signals",
        "scenarios/test_launcher.py::TestLaunchers::test_kernel_death_ends_ranks_and_supervisor_with_time_to_save[kill]",
    ),
    "Crashes are explained": (
        "scenarios/test_launcher.py::TestFailures::test_crash_of_a_rank_by_a_signal_names_cell_and_line",
        "scenarios/test_magics.py::TestThatGoesWrong::test_failure_with_a_known_cause_is_explained",
        "scenarios/test_magics.py::TestThatGoesWrong::test_a_traceback_is_shown_once_and_folded",
    ),
    "Hangs end": (
        "scenarios/test_hang.py::test_hang_names_the_waiting_ranks_and_the_missing_rank",
    ),
    "Runs resume": (
        "scenarios/test_magics.py::TestThatGoesWrong::test_retry_and_resume_continue_from_the_last_checkpoint",
    ),
    "Mistakes are found early": (
        "kernel/test_setup.py::TestKernel::test_setup_card_and_json_on_kaggle",
        "scenarios/test_magics.py::TestThatGoesWrong::test_lint_refuses_code_that_certainly_fails",
        "test_cli.py::TestLint::test_lint_as_text",
    ),
    "Single-core debugging": (
        "scenarios/test_magics.py::TestDebug::test_debug_cell_shows_its_value_and_the_device_once",
    ),
    "One card for each run": (
        "scenarios/test_magics.py::TestATrainCell::test_card_and_log_of_a_train_cell",
        "scenarios/test_magics.py::TestATrainCell::test_card_keeps_metrics_and_time_summary_at_the_end",
        "scenarios/test_chips.py::test_chip_usage_on_the_card_and_in_the_run_summary",
    ),
    "Long runs": (
        "scenarios/test_background.py::TestInTheBackground::test_background_wait_times_out_and_the_run_continues_until_stop",
        "scenarios/test_background.py::TestDetached::test_attach_to_a_foreground_run_from_another_process",
    ),
    "Runs can be compared": (
        "scenarios/test_magics.py::TestListings::test_listing_of_runs_and_logs",
    ),
    "Cells run once": (
        "scenarios/test_launcher.py::TestLaunchers::test_warm_fork_server_is_reused_unless_the_environment_differs",
        "scenarios/test_kept_preludes.py::test_kept_prelude_is_reused_while_no_cell_has_changed",
        "scenarios/test_kept_preludes.py::test_prelude_run_ahead_of_the_train_cell_is_used",
    ),
    "Safe forks": (
        "scenarios/test_launcher.py::TestReplicate::test_replicate_after_a_backward_pass_in_the_prelude",
    ),
    "Exact data": (
        "scenarios/test_training_on_ranks.py::test_shard_on_ranks_gives_each_sample_once_in_equal_steps",
        "scenarios/test_training_on_ranks.py::test_predict_on_ranks_shares_the_work_and_gathers_on_rank_0",
        "scenarios/test_training_on_ranks.py::test_masked_loss_on_ranks_weighs_every_sample_equally",
    ),
    "Faithful rehearsal": (
        "scenarios/test_deadlocks.py::test_deadlock_inside_torch_xla_launch_counts_collectives",
    ),
    "Libraries run unmodified": (
        "scenarios/test_launcher.py::TestThatWorks::test_dataloader_workers_run_in_ranks",
        "scenarios/test_libraries.py::test_accelerate_uses_the_ranks_of_the_run",
    ),
    "A pod is one more option": (
        "scenarios/test_places.py::test_a_train_cell_runs_on_every_host",
        "scenarios/test_places.py::test_host_that_refuses_ssh_is_named_before_anything_starts",
    ),
}
"""By the title of a line: names of tests below `tests/`, all or one of their parameters."""

SCENARIOS = frozenset(name for names in ROWS.values() for name in names)
