"""The papers' studies on a store and a text, as one HTML page."""
