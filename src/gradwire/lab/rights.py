"""What a lab needs from the system: tools, rights and kernel features, with advice if one is missing.

A lab needs root or unprivileged user namespaces. The keeper finds out by trying; this module words the answer.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gradwire.core.errors import RightsError
from gradwire.lab.errors import LabError

_PACKAGES = {
    "ip": "iproute2 (`apt-get install iproute2`, `dnf install iproute`)",
    "bridge": "iproute2 (`apt-get install iproute2`, `dnf install iproute`)",
    "tc": "iproute2 (`apt-get install iproute2`, `dnf install iproute-tc`)",
    "nsenter": "util-linux (`apt-get install util-linux`, `dnf install util-linux-core`)",
}
_SWITCHES = (
    # Path below /proc/sys, the value that forbids namespaces, the command that permits them.
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("user/max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=10000"),
)
_KERNEL = (
    # Word in a tool's error message or command, and what it means.
    ("netem", "This kernel has no netem: load it (`modprobe sch_netem`) or leave the delay at 'none'."),
    ("tbf", "This kernel has no tbf: load it (`modprobe sch_tbf`) or leave the rate at 'none'."),
    ("bridge", "The kernel may lack bridges: load the module (`modprobe bridge`)."),
    ("veth", "The kernel may lack veth pairs: load the module (`modprobe veth`)."),
)


def search_path() -> str:
    """PATH with the folders of system tools, which an ordinary user's PATH often lacks."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find_tool(name: str) -> str:
    """Absolute path of a system tool.

    Raises:
        RightsError: It is not installed. The message names the package.
    """
    found = shutil.which(name, path=search_path())
    if found is None:
        raise RightsError(f"The tool `{name}` is not on PATH. Install {_PACKAGES[name]}.")
    return found


def find_loss_tool() -> str:
    """Absolute path of `nft` or, failing that, `iptables`.

    Raises:
        RightsError: Neither is installed.
    """
    for name in ("nft", "iptables"):
        if found := shutil.which(name, path=search_path()):
            return found
    raise RightsError(
        "Packet loss needs `nft` or `iptables`, and neither is on PATH. "
        "Install nftables (`apt-get install nftables`, `dnf install nftables`), or leave the loss at 0."
    )


def refusal(step: str, reason: str, *, sysctl: Path = Path("/proc/sys"), is_root: bool | None = None) -> RightsError:
    """The error for a system that does not let the lab make its namespaces.

    Args:
        step: Step that was refused.
        reason: Reason that the system gave.
        sysctl: Folder of the kernel's settings.
        is_root: Whether the user is root; None asks the system.
    """
    is_root = os.geteuid() == 0 if is_root is None else is_root
    forbidding = [command for name, value, command in _SWITCHES if _reads(sysctl / name, value)]
    if is_root:
        ways = ["in a container, start it with `--cap-add SYS_ADMIN --cap-add NET_ADMIN`"]
    else:
        ways = ["run as root (`sudo -E`)"]
    ways += [f"permit unprivileged user namespaces (`{command}` as root)" for command in forbidding]
    if not is_root and not forbidding:
        ways.append("ask for user namespaces, which a container's seccomp profile may forbid")
    return RightsError(
        f"Network namespaces are not permitted: {reason} (in {step}). To permit them: {'; or '.join(ways)}."
    )


def tool_failure(command: list[str], output: str, script: str | None = None) -> LabError:
    """The error for a system tool that failed, with advice where the kernel lacks a feature.

    Args:
        command: Tool and arguments.
        output: Error message of the tool.
        script: Standard input of the tool. For a batch, the line named in the error message is shown.
    """
    tool = os.path.basename(command[0])
    at = re.search(r"Command failed -:(\d+)", output)
    failed = script.splitlines()[int(at[1]) - 1] if at and script else " ".join(command[1:])
    unknown = any(word in output for word in ("unknown", "Unknown", "not supported", "No such file"))
    advice = [text for word, text in _KERNEL if unknown and word in f"{failed} {output}"]
    hint = advice[0] if advice else "This may be a bug of the lab: please report it."
    return LabError(f"`{tool}` could not do `{failed}`: {output.strip()}. {hint}")


def _reads(path: Path, value: str) -> bool:
    try:
        return path.read_text().strip() == value
    except OSError:
        return False
