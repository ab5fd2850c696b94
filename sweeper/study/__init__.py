"""Open or resume a study, give it a sampler and a pruner, and work on its trials."""
