"""The checks of `gradwire doctor`: each looks at one thing of this machine, and says what to do where it is missing."""
