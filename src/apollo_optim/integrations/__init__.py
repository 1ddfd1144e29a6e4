"""The optimizers inside other libraries: nothing here is imported by `import apollo_optim`."""
