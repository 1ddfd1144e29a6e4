"""Commands with little work of their own, a module each: frozen dataclasses of options, with a method `execute`."""
