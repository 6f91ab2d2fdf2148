"""What the agent raises, split by who can act on it.

    RankscopeError
    |-- ConfigError (ValueError)      whoever wrote config.json, an argument or a variable
    |   `-- NotAvailableError         the same: the request is right, this version cannot do it yet
    |-- UsageError (RuntimeError)     the author of the script: a call at the wrong moment, no model
    `-- SpoolError (OSError)          whoever runs the machine: the spool's folder cannot be used

Only the first three reach a script, and only from the constructor and the debugger's own methods
(and from a module whose inputs cannot be loaded as "load" asks).
Whatever fails while the model runs is logged once and counted; it never travels through the user's
torch call.
"""


class RankscopeError(Exception):
    """Base of everything the agent raises on purpose."""


class ConfigError(RankscopeError, ValueError):
    """A key, argument, variable or file is wrong; the message names it and what is allowed."""


class NotAvailableError(ConfigError):
    """A valid request that this version cannot serve; the message says what it can."""


class UsageError(RankscopeError, RuntimeError):
    """A debugger method was called at the wrong moment or with arguments that cannot work."""


class SpoolError(RankscopeError, OSError):
    """The spool folder cannot be made or written."""
