"""The compressor language (CompLL). Empty until the language arrives; the layer is reserved here."""
