"""docker/Dockerfile, which cannot be built where the tests run: what it copies and installs, and the commands that name it."""

import configparser
import re
from pathlib import Path

from gluon_mgpu.devices import gpu_builds
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
PINNED = (ROOT / "docker" / "requirements.txt").read_text(encoding="utf-8")
EXTRAS = ("train", "gpu", "doctor")


def test_it_starts_from_the_container_that_the_doctor_names_by_its_digest():
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == [gpu_builds.CONTAINER + "@${DIGEST}"]
    assert re.findall(r"^ARG (.*)$", DOCKERFILE, re.MULTILINE) == ["DIGEST"]  # without a default: it must be passed


def test_it_ends_as_a_user_who_is_not_root():
    instructions = re.findall(r"^([A-Z]+) (.*)", DOCKERFILE, re.MULTILINE)
    assert [name for name, _ in instructions[-4:]] == ["RUN", "USER", "WORKDIR", "CMD"]
    user, folder = instructions[-3][1], instructions[-2][1]
    assert f"useradd --create-home {user} " in instructions[-4][1] and f"--owner {user} {folder}" in instructions[-4][1]


def test_it_copies_all_that_the_package_is_built_from():
    sources = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    listed = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()[1:]
    assert {"setup.cfg", "pyproject.toml", "gluon_mgpu", "docker/requirements.txt"} <= set(sources)
    assert {path.split("/")[0] for path in listed} <= set(sources)


def test_it_installs_pinned_packages_and_leaves_the_containers_mxnet_alone():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}$", PINNED, re.MULTILINE))
    assert len(pinned) == len([line for line in PINNED.splitlines() if not line.startswith("#")])
    assert not [name for name in pinned if "mxnet" in name]
    installs = re.findall(r"pip install (.*?) \\", DOCKERFILE)
    assert len(installs) == 2 and all("--no-deps" in words for words in installs) and "--require-hashes" in installs[0]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = [config["options"]["install_requires"], *(config["options.extras_require"][name] for name in EXTRAS)]
    lines = [line for text in texts for line in text.splitlines() if line and not line.startswith("#")]
    for required in map(Requirement, lines):
        if required.marker is None or required.marker.evaluate({"python_version": "3.10"}):
            assert required.specifier.contains(pinned[required.name.replace("_", "-")]), required
