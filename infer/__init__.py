"""Programs around decoding: engine, residency, the decode loop, and the commands built on them."""
