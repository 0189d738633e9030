"""Observation of torch's API calls, one by one, under the names of troubleshooter's `api_dump`."""

from __future__ import annotations

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.apis.api_hook import TorchApiHook

__all__ = ["ApiOptions", "TorchApiHook"]
