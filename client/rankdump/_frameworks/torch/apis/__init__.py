"""Observation of torch's API calls, one by one, under the names of troubleshooter's `api_dump`."""
