"""`graft tenants key` and `graft tenants check`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from sglang_graft.cli.app import app
from sglang_graft.tenants import matches

RUN = CliRunner()


def test_a_key_opens_what_its_hash_stands_for(tmp_path: Path) -> None:
    made = json.loads(RUN.invoke(app, ["tenants", "key", "--json"]).stdout)
    assert matches(made["key"], [made["hash"]]) == made["hash"]
    plain = RUN.invoke(app, ["tenants", "key"])
    assert plain.exit_code == 0
    key, hashed = (line.split()[1] for line in plain.stdout.splitlines()[:2])
    assert matches(key, [hashed]) == hashed
    file = tmp_path / "t.yaml"
    file.write_text(
        f"tenants: {{acme: {{keys: ['{hashed}'], adapters: ['x/*'], page_floor: 20%}}}}"
    )
    shown = RUN.invoke(app, ["tenants", "check", str(file)])
    assert shown.exit_code == 0
    assert "acme" in shown.stdout
    assert hashed not in shown.stdout
    rows = json.loads(RUN.invoke(app, ["tenants", "check", str(file), "--json"]).stdout)
    assert rows["tenants"]["acme"]["page_floor"] == 0.2


def test_a_bad_file_is_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("tenants: {acme: {keys: [x]}}")
    result = RUN.invoke(app, ["tenants", "check", str(file)])
    assert result.exit_code == 1
    assert "tenant acme: keys: entry 1" in result.output
