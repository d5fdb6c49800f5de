"""An installed wheel finds its configuration from any folder."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.servers import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_wheel_carries_conf_and_serves_from_any_folder(tmp_path: Path) -> None:
    build = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "dualpace", "conf"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *build, str(source)],
        check=True,
        timeout=PATIENCE_S,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert "dualpace/conf/hw/rtx4090.yaml" in archive.namelist()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
        "sys.argv = ['serve', '+hw=rtx4090', '--cfg', 'job']; "
        "from dualpace.cli import serve; serve(); import dualpace; print(dualpace.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "name: rtx4090" in done.stdout
    assert str(tmp_path / "site") in done.stdout
