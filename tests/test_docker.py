"""docker/Dockerfile, which cannot be built where the tests run: what it copies and installs, and the commands that name it."""

import configparser
import re
from pathlib import Path

from gluon_mgpu.runtime import gpu_builds

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def test_it_starts_from_the_container_that_the_doctor_names():
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == [gpu_builds.CONTAINER]


def test_it_copies_all_that_the_package_is_built_from():
    sources = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    listed = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()[1:]
    assert {"setup.cfg", "pyproject.toml", "gluon_mgpu"} <= set(sources)
    assert {path.split("/")[0] for path in listed} <= set(sources)


def test_it_installs_extras_that_leave_the_containers_mxnet_alone():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", DOCKERFILE)
    required = config["options"]["install_requires"] + "".join(
        config["options.extras_require"][name] for name in extras.split(",")
    )
    assert "mxnet" not in re.sub(r"#.*", "", required)
