"""Trained models at work: perplexity and multiple-choice tasks (`apollo eval`), and text (`apollo write`)."""
