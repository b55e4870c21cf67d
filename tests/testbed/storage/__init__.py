"""The test bed's storage: what a vendor's CSI driver would do, over local folders and devices."""
