"""What client, agent, coordinator and readers agree on. Stdlib and numpy only."""
