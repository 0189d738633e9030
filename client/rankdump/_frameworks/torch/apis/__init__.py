"""Observation of each single call of torch's API, under the names of troubleshooter's
`api_dump`.
"""
