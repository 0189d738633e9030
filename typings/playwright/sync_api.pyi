# Only `make test-web` installs it.
from typing import Any, TypeAlias

Browser: TypeAlias = Any
BrowserContext: TypeAlias = Any
Page: TypeAlias = Any
Response: TypeAlias = Any

def expect(actual: Any, message: str | None = None) -> Any: ...
def sync_playwright() -> Any: ...
