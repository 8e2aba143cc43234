"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gradwire.net.tls import TlsFiles

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """An authority that signs certificates of ends, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._run("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")

    def files(self, name: str, hosts: str = "IP:127.0.0.1", authority: Authority | None = None) -> TlsFiles:
        """The files of an end; it trusts `authority`, by default this one."""
        self._run("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={hosts}\n")
        self._run(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-extfile", f"{name}.ext", "-days", "2", "-out", f"{name}.pem",
        )  # fmt: skip
        (self._folder / f"{name}.key").chmod(0o600)
        trusted = (authority or self)._folder / "ca.pem"
        return TlsFiles(self._folder / f"{name}.pem", self._folder / f"{name}.key", trusted)

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self._folder, check=True, capture_output=True)
