"""Time: the loop, and what decides when it logs, stops, goes back, or is kept."""
