"""What ships: the wheel holds every file of the package, and the same version stands everywhere."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import hatchling.build
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _wheel_files(folder: Path) -> set[str]:
    wheel = folder / hatchling.build.build_wheel(str(folder))
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped = _wheel_files(tmp_path)
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix() for path in (source / "paceline").rglob("*") if path.is_file()
    }
    expected = {name for name in files if "__pycache__" not in name}
    assert "paceline/py.typed" in expected
    assert expected == {name for name in shipped if name.startswith("paceline/")}
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in shipped if "dist-info/licenses" in name}


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_for_ci() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    names = {_name(requirement) for requirement in [*PROJECT["dependencies"], *extras]} - {"paceline"}
    assert names <= pinned, f"missing in constraints.txt: {sorted(names - pinned)}"


def _name(requirement: str) -> str:
    for mark in "[<>=!~; ":
        requirement = requirement.partition(mark)[0]
    return requirement.lower().replace("_", "-")
