#!/usr/bin/env bash
# A Python environment on a volume, with a package installed by pip.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start

venv() { python3 -m venv "$MNT/venv"; }
# A package on disk, so that the test needs no registry.
install_local() {
    mkdir -p "$WORK/pkg/sample_pkg" && cd "$WORK/pkg" || return 1
    printf '[project]\nname = "sample-pkg"\nversion = "1.0"\n[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n' > pyproject.toml
    echo 'def answer(): return 42' > sample_pkg/__init__.py
    cat > backend.py <<'PY'
import os
import zipfile


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "sample_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.write("sample_pkg/__init__.py")
        info = "sample_pkg-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: sample-pkg\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
PY
    "$MNT/venv/bin/pip" install -q --disable-pip-version-check --no-index "$WORK/pkg"
}
install_registry() { "$MNT/venv/bin/pip" install -q --disable-pip-version-check six; }
use() { "$MNT/venv/bin/python" -c 'import sample_pkg, six; assert sample_pkg.answer() == 42; print(six.__version__)'; }
uninstall() { "$MNT/venv/bin/pip" uninstall -q -y six && ! "$MNT/venv/bin/python" -c 'import six' 2>/dev/null; }
compile_all() { "$MNT/venv/bin/python" -m compileall -q "$MNT/venv/lib" > /dev/null; }

check "venv" venv
check "pip install of a folder" install_local
check "pip install from the registry" install_registry
check "import" use
check "byte-compile everything" compile_all
check "remount" farm_remount
check "import after a remount" use
check "pip uninstall" uninstall
report
