"""Observes calls of torch's API, one by one, as troubleshooter's `api_dump` names them."""

from rankdump.adapters.torch.apis.attaching import ApiHook
from rankdump.adapters.torch.apis.options import ApiOptions

__all__ = ["ApiHook", "ApiOptions"]
