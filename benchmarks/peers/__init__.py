"""What people would use instead of foretrace, as plug-ins of `foretrace evaluate`."""
