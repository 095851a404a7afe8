"""pagetide.monitor: sees every byte of the devices. Built by its own issue; today only free host memory is asked for."""
