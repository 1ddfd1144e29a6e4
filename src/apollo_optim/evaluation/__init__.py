"""Trained models at work: multiple-choice tasks (`apollo eval --tasks`) and text (`apollo write`)."""
