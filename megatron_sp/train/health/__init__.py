"""Whether a run is well: failed steps, their diagnosis, equal replicas, and the loss scale."""
