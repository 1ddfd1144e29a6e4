"""Fine-tuning: instruction data, its batches, a model to begin from, and the run that puts them together."""
