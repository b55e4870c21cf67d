"""The tests mirror the layout of the product: a module's tests are found by its path."""

from pathlib import Path
from typing import Final

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("core", "exposer", "nodeagent", "client", "datamover")

_TESTED_ELSEWHERE: Final = {
    "datamover/data_path/one_open_runs.py": "tests/datamover/flows/test_block_mover.py",
    "datamover/data_path/snapshot_runs.py": "tests/datamover/flows/test_filesystem.py",
    "core/clock.py": "tests/core/models/test_units.py",
    "core/kube/types.py": "tests/core/kube/test_resources_forms.py",
    "core/models/names.py": "tests/core/models/test_units.py",
    "core/snapshot_contract.py": "tests/core/test_mover_specs.py",
    "nodeagent/runtime/lease.py": "tests/nodeagent/leader/test_election.py",
    "core/version.py": "tests/nodeagent/test_main.py",
    "datamover/__main__.py": "tests/datamover/test_main.py",
    "datamover/storage/token_requests.py": "tests/datamover/storage/test_token_files.py",
    "datamover/pod/file_relay.py": "tests/datamover/pod/test_file_stream.py",
    "client/backups/files.py": "tests/client/cli/test_backup_files.py",
    "client/verifications/read_back.py": "tests/client/verifications/test_verify.py",
    "datamover/data_path/in_place_preview.py": "tests/datamover/flows/test_in_place_preview.py",
    "datamover/data_path/restore.py": "tests/datamover/flows/test_roundtrip.py",
    "datamover/kopia/client_config.py": "tests/datamover/kopia/test_repository.py",
    "datamover/runtime/cancellation.py": "tests/datamover/flows/test_cancel.py",
    "datamover/runtime/signals.py": "tests/datamover/test_main.py",
    "exposer/model.py": "tests/exposer/test_expose_run.py",
    "client/cli/collection_commands.py": "tests/client/cli/test_backup.py",
    "client/session.py": "tests/client/verifications/test_scratch.py",
    "client/mover_jobs.py": "tests/client/cli/test_backup_delete.py",
    "client/cli/run_schedule.py": "tests/client/cli/test_schedule.py",
    "client/backups/deletion_report.py": "tests/client/backups/test_delete.py",
    "nodeagent/coverage/cluster.py": "tests/nodeagent/coverage/test_selection.py",
    "nodeagent/cli.py": "tests/nodeagent/config/test_check.py",
    "client/cli/install_flags.py": "tests/client/cli/test_install.py",
    "nodeagent/config/keys.py": "tests/nodeagent/config/test_parse.py",
    "nodeagent/config/value_types.py": "tests/nodeagent/config/test_parse.py",
    "nodeagent/leader/context.py": "tests/nodeagent/leader/test_dispatcher.py",
    "nodeagent/leader/maintenance/jobs.py": "tests/nodeagent/leader/maintenance/test_steps.py",
    "nodeagent/leader/maintenance/controller.py": "tests/nodeagent/leader/maintenance/test_steps.py",
    "nodeagent/maintenance/jobs.py": "tests/nodeagent/leader/maintenance/test_steps.py",
    "nodeagent/leader/maintenance/restore_tests.py": "tests/nodeagent/leader/maintenance/test_verifications.py",
    "nodeagent/leader/repositories/init_pod.py": "tests/nodeagent/leader/repositories/test_controller.py",
    "nodeagent/maintenance/restore_tests.py": "tests/nodeagent/maintenance/test_verification.py",
    "nodeagent/leader/admission/writer.py": "tests/nodeagent/leader/admission/test_admission_pass.py",
    "nodeagent/node/data_path_steps.py": "tests/nodeagent/flows/test_retries.py",
    "nodeagent/node/expose_steps.py": "tests/nodeagent/node/test_cache.py",
    "nodeagent/node/mover_events.py": "tests/nodeagent/node/test_progress.py",
    "nodeagent/runtime/settings.py": "tests/nodeagent/test_main.py",
    "client/install/daemonset.py": "tests/client/install/test_manifests.py",
    "client/install/options.py": "tests/client/install/test_manifests.py",
    "client/permissions.py": "tests/deploy/test_rbac.py",
    "client/volume_check_plan.py": "tests/client/test_volume_check.py",
    "client/cli/version.py": "tests/integration/test_uninstall.py",
    "nodeagent/runtime/http.py": "tests/nodeagent/runtime/test_transport.py",
    "nodeagent/runtime/permissions.py": "tests/deploy/test_rbac.py",
}
"""Modules that serve one neighbor, and the file that tests them through it."""


def test_every_module_has_tests_at_its_path_or_where_the_table_says() -> None:
    missing = []
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            module = path.relative_to(_ROOT)
            if path.name == "__init__.py" or module.as_posix() == "nodeagent/__main__.py":
                continue
            folder = _ROOT / "tests" / module.parent
            if not any([*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")]):
                missing.append(module.as_posix())
    assert [module for module in missing if module not in _TESTED_ELSEWHERE] == []
    assert [module for module in _TESTED_ELSEWHERE if module not in missing] == [], "has tests at its path now"


def test_the_files_of_the_table_exist() -> None:
    assert [file for file in _TESTED_ELSEWHERE.values() if not (_ROOT / file).is_file()] == []


def test_no_test_file_passes_400_lines() -> None:
    """A larger file tests several things: split it."""
    files = [path for path in (_ROOT / "tests").rglob("*.py") if "recordings" not in path.parts]
    assert [str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
