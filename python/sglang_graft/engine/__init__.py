"""Every contact with SGLang: one small module per hook or subclass, listed in `activate`."""
