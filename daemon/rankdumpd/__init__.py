"""The processes beside the training job: an agent on each host, a coordinator for each job."""
