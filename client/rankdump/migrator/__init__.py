"""Dumps and compares the calls of an API, in the words of troubleshooter's `migrator`."""
