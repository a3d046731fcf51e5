"""The data of a problem: cut into shards, stacked in memory or kept in a store."""
