"""Code that monitor screens share: base class, frame, panels, bindings. A screen's own parts are in its folder."""
