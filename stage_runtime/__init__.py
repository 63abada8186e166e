"""What every Omnistage stage shares: the Engine interface, step scheduling, the lane, health, errors, settings and logs."""
