// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What one source holds of the SMTP server, connections and memory, so that none can have all of
 * it. A source is an IPv4 address or an IPv6 /64. Touches nothing.
 */
import * as Ip from "../src/mail/Ip.ts"
import type { Budget } from "../src/mail/SmtpData.ts"
import type { Limits } from "../src/services/SmtpServer.ts"

/** What a connection may have. */
export interface Share {
  /** It comes from a network without limits per source. */
  readonly isExempt: boolean
  readonly budget: Budget & {
    /** Octets that this source may still have. */
    readonly freeBytes: () => number
  }
  /** To be called once, when the connection is gone. */
  readonly leave: () => void
}

export interface Sources {
  /** Counts a connection; undefined = its source has as many as it may. */
  readonly enter: (ip: string) => Share | undefined
}

interface Holding {
  connections: number
  bytes: number
}

export const make = (limits: Limits): Sources => {
  const exempt = limits.exempt.flatMap((text) => Ip.parseNetwork(text) ?? [])
  // A single message of the size we announce always has room, else it could never come in.
  const mostBytes = Math.max(limits.memoryBytes * limits.sourceShare, limits.messageBytes)
  const mostConnections = Math.max(Math.floor(limits.connections * limits.sourceShare), 1)
  const holdings = new Map<string, Holding>()
  let freeBytes = limits.memoryBytes

  /** The share of all is no bound for this host itself: its programs are one source together. */
  const allowed = (octets: ReadonlyArray<number> | undefined): number =>
    octets !== undefined && Ip.isLoopback(octets)
      ? limits.connectionsPerSource
      : Math.min(limits.connectionsPerSource, mostConnections)

  const share = (key: string, holding: Holding, isExempt: boolean): Share => {
    const forget = (): void => {
      const isEmpty = holding.connections === 0 && holding.bytes === 0
      if (isEmpty && holdings.get(key) === holding) holdings.delete(key)
    }
    const left = (): number =>
      isExempt ? freeBytes : Math.min(freeBytes, mostBytes - holding.bytes)
    const take = (bytes: number): void => {
      freeBytes -= bytes
      holding.bytes += bytes
    }
    return {
      isExempt,
      budget: {
        freeBytes: left,
        reserve: (bytes) => {
          if (bytes > left()) return false
          take(bytes)
          return true
        },
        release: (bytes) => {
          take(-bytes)
          forget()
        }
      },
      leave: () => {
        holding.connections--
        forget()
      }
    }
  }

  const enter = (ip: string): Share | undefined => {
    // A link-local address comes with the name of its interface (RFC 4007 section 11).
    const octets = Ip.parse(ip.split("%", 1)[0]!)
    const isExempt = octets !== undefined && exempt.some((network) => Ip.contains(network, octets))
    const key = octets === undefined ? ip : Ip.source(octets)
    const holding = holdings.get(key) ?? { connections: 0, bytes: 0 }
    if (!isExempt && holding.connections >= allowed(octets)) return undefined
    holding.connections++
    holdings.set(key, holding)
    return share(key, holding, isExempt)
  }

  return { enter }
}
