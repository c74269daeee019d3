"""What monitor screens share: base class, frame, header, footer, layout, bindings. A screen's own parts: its folder."""
