"""The subcommands of `apollo`, a module each: frozen dataclasses whose fields are options, with a method `execute`."""
