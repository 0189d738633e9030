"""Observes calls of torch's API, one by one, as troubleshooter's `api_dump` names them."""

from rankdump.adapters.api_calls import ApiOptions
from rankdump.adapters.torch.apis.attaching import ApiHook

__all__ = ["ApiHook", "ApiOptions"]
