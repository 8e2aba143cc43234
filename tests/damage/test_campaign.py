"""The short form of the campaign of damaged state; `python -m tests.damage` is the long one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from gradwire.parameter_server import checkpoint
from gradwire.parameter_server.records import RecordFile
from tests.damage import campaign

EVERY = 97


def test_damaged_files_never_lead_to_a_wrong_state(tmp_path: Path) -> None:
    found = list(campaign.run(tmp_path / "state", EVERY))
    assert [counts.target for counts in found] == campaign.TARGETS
    for counts in found:
        num_cases = sum(sum(outcomes.values()) for outcomes in counts.outcomes.values())
        assert num_cases > len(campaign.DAMAGES) * counts.num_bytes / EVERY / 2


def test_the_campaign_can_fail_on_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no digest were compared."""
    monkeypatch.setattr(checkpoint, "_read", read_without_digest)
    monkeypatch.setattr(campaign, "TARGETS", [campaign.Target("checkpoint-2.safetensors", campaign.SAME)])
    with pytest.raises(campaign.WrongStateError, match="not that of the records before the damage"):
        list(campaign.run(tmp_path / "state", EVERY))


def read_without_digest(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], bytes]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, json.loads(metadata["gradwire"]), bytes.fromhex(metadata["digest"])
    except (SafetensorError, OSError, TypeError, ValueError, KeyError) as error:
        raise checkpoint.DamagedCheckpointError(str(error)) from error


def test_the_campaign_can_fail_on_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a journal ended wherever it is damaged."""
    monkeypatch.setattr(RecordFile, "_check_end", lambda self, last: None)
    monkeypatch.setattr(campaign, "TARGETS", [campaign.Target(campaign.NEWEST, campaign.REFUSED)])
    with pytest.raises(campaign.WrongStateError, match="older, which is not of"):
        list(campaign.run(tmp_path / "state", EVERY))
