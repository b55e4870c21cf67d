package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mostCopies is how often a copy is begun again because the volume was written to meanwhile.
const mostCopies = 20

// repaired is how e2fsck ends that has, for example, written what was in the journal.
const repaired = 1

// store keeps volumes and snapshots. It knows nothing of Kubernetes. Every step may run twice: a record is written
// after all that it describes.
//
//	images/ID            sparse file with the data of a volume
//	images/ID.json       its record
//	volumes/ID           where its file system is mounted, or a link to its device
//	attached/ID/NODE     a node that the volume is attached to
//	nodes/NODE           a node that has a driver
//	snapshots/ID, ID.json
//	groups/ID.json       the snapshots that were taken at once
type store struct {
	base string
}

type volume struct {
	ID     string  `json:"id"`
	Bytes  int64   `json:"bytes"`
	Block  bool    `json:"block"`
	FSType string  `json:"fsType"`
	Node   string  `json:"node"` // the only one that reaches it; empty: all do
	Source string  `json:"source"`
	About  subject `json:"about"`
}

type snapshot struct {
	ID     string    `json:"id"`
	Volume string    `json:"volume"`
	Bytes  int64     `json:"bytes"`
	Block  bool      `json:"block"`
	FSType string    `json:"fsType"`
	Taken  time.Time `json:"taken"`
	Group  string    `json:"group"` // the one that it is deleted with; empty: alone
	About  subject   `json:"about"`
}

func (s *store) image(id string) string          { return filepath.Join(s.base, "images", id) }
func (s *store) mounted(id string) string        { return filepath.Join(s.base, "volumes", id) }
func (s *store) snapshot(id string) string       { return filepath.Join(s.base, "snapshots", id) }
func (s *store) node(name string) string         { return filepath.Join(s.base, "nodes", name) }
func (s *store) attached(id, node string) string { return filepath.Join(s.base, "attached", id, node) }

func read[T any](file string) (*T, error) {
	raw, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	found := new(T)
	return found, json.Unmarshal(raw, found)
}

func write(file string, record any) error {
	raw, err := json.Marshal(record)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(file+".part", raw, 0o644); err != nil {
		return err
	}
	return os.Rename(file+".part", file)
}

func (s *store) findVolume(id string) (*volume, error) { return read[volume](s.image(id) + ".json") }
func (s *store) findSnapshot(id string) (*snapshot, error) {
	return read[snapshot](s.snapshot(id) + ".json")
}

// create makes a volume with what fills its image, or else an empty one, and mounts it.
func (s *store) create(v volume, fill func(image string) error) error {
	image := s.image(v.ID)
	if err := os.MkdirAll(filepath.Dir(image), 0o755); err != nil {
		return err
	}
	if err := s.release(v.ID); err != nil { // of a call that was interrupted
		return err
	}
	if fill == nil {
		if err := s.fresh(v); err != nil {
			return err
		}
		return write(image+".json", v)
	}
	if err := fill(image); err != nil {
		return err
	}
	grow := s.mount
	if info, err := os.Stat(image); err != nil {
		return err
	} else if info.Size() < v.Bytes {
		grow = s.grow
	}
	if err := grow(v); err != nil {
		return err
	}
	return write(image+".json", v)
}

// fresh makes an image with an empty file system, and mounts it.
func (s *store) fresh(v volume) error {
	if err := resize(s.image(v.ID), v.Bytes); err != nil {
		return err
	}
	if v.Block {
		return s.mount(v)
	}
	if err := format(s.image(v.ID), v.FSType); err != nil {
		return err
	}
	if err := s.mount(v); err != nil {
		return err
	}
	return os.Chmod(s.mounted(v.ID), 0o777)
}

func resize(image string, bytes int64) error {
	file, err := os.OpenFile(image, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || info.Size() >= bytes {
		return err
	}
	return file.Truncate(bytes)
}

func format(image, fsType string) error {
	if fsType == "xfs" {
		return run("mkfs.xfs", "-q", "-f", "-K", image)
	}
	return run("mkfs."+fsType, "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", image)
}

// device returns the loop device over a volume's image, which it makes if there is none.
func (s *store) device(id string) (string, error) {
	if found, err := s.devices(id); err != nil {
		return "", err
	} else if len(found) > 0 {
		return found[0], nil
	}
	// Several processes that look for a free device at the same time find the same one.
	return output("flock", "/dev/loop-control", "losetup", "--find", "--show", s.image(id))
}

func (s *store) devices(id string) ([]string, error) {
	found, err := output("losetup", "--list", "--noheadings", "--output", "NAME", "--associated", s.image(id))
	return strings.Fields(found), err
}

func (s *store) mount(v volume) error {
	device, err := s.device(v.ID)
	if err != nil {
		return err
	}
	target := s.mounted(v.ID)
	if v.Block {
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		_ = os.Remove(target)
		return os.Symlink(device, target)
	}
	if isMountPoint(target) {
		return nil
	}
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	options := "defaults"
	if v.FSType == "xfs" {
		options = "nouuid" // a copy has the one of its source
	}
	return run("mount", "-t", v.FSType, "-o", options, device, target)
}

// adopt mounts a device that has a file system by now, or unmounts the file system of a volume, and shows its device.
func (s *store) adopt(v *volume, fsType string) error {
	if v.Block = !v.Block; v.Block {
		v.FSType = ""
	} else if v.FSType = fsType; fsType == "" {
		v.FSType = "ext4"
	}
	if err := s.release(v.ID); err != nil {
		return err
	}
	if err := s.mount(*v); err != nil {
		return err
	}
	return write(s.image(v.ID)+".json", v)
}

// grow lets image, device and file system have the size of the volume, and mounts it. An ext4 must not be in use: to
// grow one that is mounted takes CAP_SYS_RESOURCE, which not every machine gives.
func (s *store) grow(v volume) error {
	image := s.image(v.ID)
	if v.FSType == "ext4" {
		if err := s.release(v.ID); err != nil {
			return err
		}
	}
	if err := resize(image, v.Bytes); err != nil {
		return err
	}
	if v.FSType == "ext4" {
		var exit *exec.ExitError
		if err := run("e2fsck", "-f", "-p", image); err != nil && !(errors.As(err, &exit) && exit.ExitCode() == repaired) {
			return err
		}
		if err := run("resize2fs", image); err != nil {
			return err
		}
	}
	device, err := s.device(v.ID)
	if err != nil {
		return err
	}
	if err := run("losetup", "--set-capacity", device); err != nil {
		return err
	}
	if err := s.mount(v); err != nil || v.FSType != "xfs" {
		return err
	}
	return run("xfs_growfs", s.mounted(v.ID))
}

// release unmounts a volume and frees its device. The kernel frees one that is still open at its last close.
func (s *store) release(id string) error {
	target := s.mounted(id)
	if isMountPoint(target) {
		if err := unix.Unmount(target, 0); err != nil {
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := os.Stat(s.image(id)); err == nil {
		found, err := s.devices(id)
		if err != nil {
			return err
		}
		for _, device := range found {
			if err := run("losetup", "--detach", device); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *store) delete(id string) error {
	if err := s.release(id); err != nil {
		return err
	}
	_ = os.RemoveAll(filepath.Dir(s.attached(id, "x")))
	return errors.Join(remove(s.image(id)), remove(s.image(id)+".json"))
}

func (s *store) take(v volume, shot snapshot) error {
	target := s.snapshot(shot.ID)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if err := s.copy(v, target); err != nil {
		return err
	}
	return write(target+".json", shot)
}

// copy writes a volume to a file as it is at one moment, after all writes that have ended.
func (s *store) copy(v volume, target string) error {
	for range mostCopies {
		if err := s.flush(v); err != nil {
			return err
		}
		before, err := os.Stat(s.image(v.ID))
		if err != nil {
			return err
		}
		if err := copyFile(s.image(v.ID), target); err != nil {
			return err
		}
		after, err := os.Stat(s.image(v.ID))
		if err != nil {
			return err
		}
		if after.ModTime().Equal(before.ModTime()) {
			return nil
		}
	}
	return status.Errorf(codes.Unavailable, "volume %s is written to all the time", v.ID)
}

func copyFile(source, target string) error {
	return run("cp", "--reflink=auto", "--sparse=always", source, target)
}

// flush writes into the image what file system and device have in memory.
func (s *store) flush(v volume) error {
	path := s.mounted(v.ID) // of a block volume, a link to its device
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if v.Block {
		return file.Sync()
	}
	return unix.Syncfs(int(file.Fd()))
}

// snapshots are the IDs of all, sorted.
func (s *store) snapshots() []string {
	entries, _ := os.ReadDir(filepath.Dir(s.snapshot("x")))
	var ids []string
	for _, entry := range entries {
		if id, isRecord := strings.CutSuffix(entry.Name(), ".json"); isRecord {
			ids = append(ids, id)
		}
	}
	return ids
}

func (s *store) deleteSnapshot(id string) error {
	return errors.Join(remove(s.snapshot(id)+".json"), remove(s.snapshot(id)))
}

func remove(file string) error {
	if err := os.Remove(file); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// isMountPoint compares devices, so a bind mount of the same file system on itself is none.
func isMountPoint(target string) bool {
	var inner, outer unix.Stat_t
	if unix.Lstat(target, &inner) != nil || unix.Lstat(filepath.Dir(target), &outer) != nil {
		return false
	}
	return inner.Dev != outer.Dev
}

func run(argv ...string) error {
	_, err := output(argv...)
	return err
}

func output(argv ...string) (string, error) {
	command := exec.Command(argv[0], argv[1:]...)
	raw, err := command.CombinedOutput()
	text := strings.TrimSpace(string(raw))
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strconv.Quote(strings.Join(argv, " ")), err, text)
	}
	return text, nil
}
