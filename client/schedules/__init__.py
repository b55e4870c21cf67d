"""What the commands about schedules do: CronJobs that back up volumes and delete expired backups."""
