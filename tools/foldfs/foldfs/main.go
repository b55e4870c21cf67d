// Command foldfs mounts a directory a second time, as a file system that takes some names for others or refuses them.
//
//	foldfs DIRECTORY MOUNTPOINT [RULE…]
//
// It prints a line once it is mounted, and unmounts when its standard input ends. It is for tests, which run as root:
// what it creates belongs to root.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
	"golang.org/x/text/unicode/norm"
)

// The rules. Sources: Naming Files, Paths, and Namespaces (Windows); Apple File System Reference, normalization.
const (
	caseless = "case" // names that differ in case alone are one
	form     = "form" // so are those that differ in their Unicode normalization form
	end      = "end"  // dots and spaces at the end are dropped
	odd      = "odd"  // control characters and what SMB reserves are refused
)

type rules map[string]bool

// keep returns the name that a file gets.
func (r rules) keep(name string) (string, syscall.Errno) {
	if r[odd] && strings.ContainsFunc(name, func(c rune) bool { return c < ' ' || strings.ContainsRune(`:"*?<>|\`, c) }) {
		return "", syscall.EINVAL
	}
	if r[end] {
		name = strings.TrimRight(name, ". ")
	}
	if name == "" {
		return "", syscall.EINVAL
	}
	return name, 0
}

// fold returns the same for all names that are one.
func (r rules) fold(name string) string {
	if r[form] {
		name = norm.NFC.String(name)
	}
	if r[caseless] {
		name = strings.ToLower(name)
	}
	return name
}

// node is an entry of the directory below, by a descriptor that only names it, so that its path does not matter.
type node struct {
	fs.Inode
	rules rules
	file  *os.File
}

// naming is held while a name is looked for and then used.
var naming sync.Mutex

func (n *node) fd() int { return int(n.file.Fd()) }

// path leads to the entry itself, also for calls that take no such descriptor.
func (n *node) path() string { return fmt.Sprintf("/proc/self/fd/%d", n.fd()) }

// find returns the name that an entry has, or is to get if there is none.
func (n *node) find(name string) (string, bool, syscall.Errno) {
	kept, errno := n.rules.keep(name)
	if errno != 0 {
		return "", false, errno
	}
	var status unix.Stat_t
	if err := unix.Fstatat(n.fd(), kept, &status, unix.AT_SYMLINK_NOFOLLOW); err != unix.ENOENT {
		return kept, err == nil, fs.ToErrno(err)
	}
	names, err := os.ReadDir(n.path())
	if err != nil {
		return "", false, fs.ToErrno(err)
	}
	for _, one := range names {
		if n.rules.fold(one.Name()) == n.rules.fold(kept) {
			return one.Name(), true, 0
		}
	}
	return kept, false, 0
}

func (n *node) child(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	fd, err := unix.Openat(n.fd(), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fs.ToErrno(err)
	}
	found := &node{rules: n.rules, file: os.NewFile(uintptr(fd), name)}
	var status syscall.Stat_t
	if err := syscall.Fstat(fd, &status); err != nil {
		return nil, fs.ToErrno(err)
	}
	out.Attr.FromStat(&status)
	inode := n.NewInode(ctx, found, fs.StableAttr{Mode: status.Mode, Ino: status.Ino, Gen: 1})
	if inode.Operations() != found {
		found.file.Close()
	}
	return inode, 0
}

// make creates an entry under a name that no other has.
func (n *node) make(ctx context.Context, name string, out *fuse.EntryOut, create func(string) error) (*fs.Inode, syscall.Errno) {
	naming.Lock()
	defer naming.Unlock()
	kept, exists, errno := n.find(name)
	if errno != 0 {
		return nil, errno
	}
	if exists {
		return nil, syscall.EEXIST
	}
	if err := create(kept); err != nil {
		return nil, fs.ToErrno(err)
	}
	return n.child(ctx, kept, out)
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	naming.Lock()
	defer naming.Unlock()
	found, exists, errno := n.find(name)
	if errno == syscall.EINVAL || (errno == 0 && !exists) {
		return nil, syscall.ENOENT
	}
	if errno != 0 {
		return nil, errno
	}
	return n.child(ctx, found, out)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, name, out, func(kept string) error { return unix.Mkdirat(n.fd(), kept, mode) })
}

func (n *node) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, name, out, func(kept string) error { return unix.Symlinkat(target, n.fd(), kept) })
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	fd := -1
	inode, errno := n.make(ctx, name, out, func(kept string) (err error) {
		fd, err = unix.Openat(n.fd(), kept, opening(flags)|unix.O_CREAT|unix.O_EXCL, mode)
		return err
	})
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return inode, fs.NewLoopbackFile(fd), 0, 0
}

func opening(flags uint32) int {
	return int(flags)&^(unix.O_APPEND|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|fuse.FMODE_EXEC) | unix.O_CLOEXEC
}

func (n *node) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	fd, err := unix.Open(n.path(), opening(flags), 0)
	if err != nil {
		return nil, 0, fs.ToErrno(err)
	}
	return fs.NewLoopbackFile(fd), 0, 0
}

func (n *node) remove(name string, flags int) syscall.Errno {
	naming.Lock()
	defer naming.Unlock()
	found, _, errno := n.find(name)
	if errno != 0 {
		return errno
	}
	return fs.ToErrno(unix.Unlinkat(n.fd(), found, flags))
}

func (n *node) Unlink(_ context.Context, name string) syscall.Errno {
	return n.remove(name, 0)
}

func (n *node) Rmdir(_ context.Context, name string) syscall.Errno {
	return n.remove(name, unix.AT_REMOVEDIR)
}

// Rename gives the entry the new name, also in the place of one that has it in another form.
func (n *node) Rename(_ context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	naming.Lock()
	defer naming.Unlock()
	to := parent.(*node)
	from, _, errno := n.find(name)
	if errno != 0 {
		return errno
	}
	there, _, errno := to.find(newName)
	if errno != 0 {
		return errno
	}
	kept, _ := n.rules.keep(newName)
	if err := unix.Renameat2(n.fd(), from, to.fd(), there, uint(flags)); err != nil {
		return fs.ToErrno(err)
	}
	return fs.ToErrno(unix.Renameat(to.fd(), there, to.fd(), kept))
}

// OpendirHandle reads the directory below: what is removed while it is read is not in it when it is read again.
func (n *node) OpendirHandle(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	fd, err := unix.Open(n.path(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fs.ToErrno(err)
	}
	stream, errno := fs.NewLoopbackDirStreamFd(fd)
	return stream, 0, errno
}

func (n *node) Readlink(context.Context) ([]byte, syscall.Errno) {
	target := make([]byte, unix.PathMax)
	size, err := unix.Readlinkat(n.fd(), "", target)
	return target[:max(0, size)], fs.ToErrno(err)
}

func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	var status syscall.Stat_t
	err := syscall.Fstat(n.fd(), &status)
	out.FromStat(&status)
	return fs.ToErrno(err)
}

func (n *node) Setattr(ctx context.Context, file fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if err := n.set(in); err != nil {
		return fs.ToErrno(err)
	}
	return n.Getattr(ctx, file, out)
}

func (n *node) set(in *fuse.SetAttrIn) error {
	uid, hasUID := in.GetUID()
	gid, hasGID := in.GetGID()
	if hasUID || hasGID {
		if err := unix.Fchownat(n.fd(), "", orSame(uid, hasUID), orSame(gid, hasGID), unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	// A change of the owner removes setuid.
	if mode, ok := in.GetMode(); ok {
		if err := unix.Chmod(n.path(), mode); err != nil {
			return err
		}
	}
	if size, ok := in.GetSize(); ok {
		if err := unix.Truncate(n.path(), int64(size)); err != nil {
			return err
		}
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	if atime, ok := in.GetATime(); ok {
		times[0] = unix.Timespec{Sec: atime.Unix(), Nsec: int64(atime.Nanosecond())}
	}
	if mtime, ok := in.GetMTime(); ok {
		times[1] = unix.Timespec{Sec: mtime.Unix(), Nsec: int64(mtime.Nanosecond())}
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, n.path(), times, 0)
}

func orSame(id uint32, given bool) int {
	if given {
		return int(id)
	}
	return -1
}

func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	var status syscall.Statfs_t
	err := syscall.Statfs(n.path(), &status)
	out.FromStatfsT(&status)
	return fs.ToErrno(err)
}

func main() {
	log.SetFlags(0)
	directory, mountpoint, named := os.Args[1], os.Args[2], rules{}
	for _, one := range os.Args[3:] {
		named[one] = true
	}
	// Such a signal goes to the tests too; whoever kills them would leave the mount.
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	unix.Umask(0)
	fd, err := unix.Open(directory, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		log.Fatalf("foldfs: cannot open %s: %v", directory, err)
	}
	root := &node{rules: named, file: os.NewFile(uintptr(fd), directory)}
	// Without timeouts, the kernel asks for each name again: another form of it may be gone. It checks permissions.
	options := fs.Options{MountOptions: fuse.MountOptions{
		AllowOther: true, DirectMountStrict: true, DisableReadDirPlus: true, DisableXAttrs: true, Name: "foldfs",
		Options: []string{"default_permissions"},
	}}
	if _, err := fs.Mount(mountpoint, root, &options); err != nil {
		log.Fatalf("foldfs: cannot mount %s: %v", mountpoint, err)
	}
	fmt.Println("mounted")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		log.Print(err)
	}
	if err := unix.Unmount(mountpoint, unix.MNT_DETACH); err != nil {
		log.Fatalf("foldfs: cannot unmount %s: %v", mountpoint, err)
	}
}
