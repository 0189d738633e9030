"""The wire: messages in `v1`, their frozen counterparts through `convert`, `views`, `errors`."""
