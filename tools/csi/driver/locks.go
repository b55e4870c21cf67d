package main

import (
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// locks lets one call at a time work on a volume or snapshot. A second one is told to come again, as the
// specification wants it (codes.Aborted).
type locks struct {
	mutex *sync.Mutex
	held  map[string]bool
}

func newLocks() locks {
	return locks{&sync.Mutex{}, map[string]bool{}}
}

func (l locks) take(name string) (func(), error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.held[name] {
		return nil, status.Errorf(codes.Aborted, "another call works on %s", name)
	}
	l.held[name] = true
	return func() {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		delete(l.held, name)
	}, nil
}
